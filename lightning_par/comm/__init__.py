"""Level 1. The only home of ``torch.distributed``: groups, the mesh, point-to-point, differentiable pairs, and a trace of all of it."""

from lightning_par.comm.group import DONE, Group, Work
from lightning_par.comm.lanes import Lanes
from lightning_par.comm.later import Later
from lightning_par.comm.meeting import Meeting
from lightning_par.comm.mesh import Mesh, apart
from lightning_par.comm.p2p import Message, exchange
from lightning_par.comm.pairs import copy_to, gather_from, reduce_from, scatter_to
from lightning_par.comm.trace import Sent, Trace

__all__ = [
    "DONE",
    "Group",
    "Lanes",
    "Later",
    "Meeting",
    "Mesh",
    "Message",
    "Sent",
    "Trace",
    "Work",
    "apart",
    "copy_to",
    "exchange",
    "gather_from",
    "reduce_from",
    "scatter_to",
]
