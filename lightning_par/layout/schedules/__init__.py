"""Pipeline schedules as data: pure functions of a few integers. A new one is one file, and its name in the list below.

``pipeline.lower`` adds the messages to what they say, ``pipeline.simulate`` proves it, and ``pipeline.engine`` runs it.
"""

from lightning_par.layout.schedules.actions import Action, Kind, read, show
from lightning_par.layout.schedules.gpipe import GPIPE
from lightning_par.layout.schedules.interleaved import INTERLEAVED
from lightning_par.layout.schedules.one_forward_one_backward import ONE_FORWARD_ONE_BACKWARD
from lightning_par.layout.schedules.schedule import Schedule, Sizes
from lightning_par.layout.schedules.zb_h1 import ZB_H1
from lightning_par.layout.schedules.zbv import ZBV

SCHEDULES = {schedule.name: schedule for schedule in (GPIPE, ONE_FORWARD_ONE_BACKWARD, INTERLEAVED, ZB_H1, ZBV)}
"""By the name that a layout gives."""

__all__ = ["SCHEDULES", "Action", "Kind", "Schedule", "Sizes", "read", "show"]
