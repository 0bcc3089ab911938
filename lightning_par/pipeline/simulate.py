"""The simulator: runs lowered lists on paper. Proves that they cannot deadlock, and tells the bubble and the peak of activations.

Lanes behave as in the worst network: a message leaves only when its receive was started (no buffering), and arrives ``latency`` later.
Sends and receives take no time of the rank; forwards, backwards and frees wait for what they need.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeVar

from lightning_par.layout import Action, Kind
from lightning_par.pipeline.lower import places, receive_of, send_of_free

Plan = Sequence[Sequence[Action]]
N = TypeVar("N", int, float)


class ScheduleError(ValueError):
    """A plan that cannot run; the message shows it, with the place where each rank stands."""


@dataclass(frozen=True)
class Costs:
    """Time of one forward, of the two parts of one backward, and of one message, in any unit.

    A backward in one piece takes the sum of its parts.
    """

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0
    latency: float = 0.0

    def of(self, action: Action, *, split: bool) -> float:
        """``split``: the action's backward is in two parts."""
        match action.kind:
            case Kind.F:
                return self.forward
            case Kind.W:
                return self.weights
            case _:
                return self.inputs + (0 if split else self.weights)


class Ran(NamedTuple):
    """A forward or (part of a) backward, and when it ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What a plan does under given costs. Lists are by rank.

    Attributes:
        timeline: the forwards and backwards, in order.
        peak_live: most (stage, micro-batch) pairs at once whose forward ran and whose backward, its weight part included, did not end; 0
            without backwards.
        messages: how many messages the rank sends.
    """

    timeline: list[list[Ran]]
    peak_live: list[int]
    messages: list[int]

    @property
    def makespan(self) -> float:
        return max(ran.end for ranks in self.timeline for ran in ranks)

    @property
    def bubble(self) -> float:
        """Idle time over ideal time, the busiest rank's work being ideal."""
        return self.makespan / self._busy - 1

    @property
    def bubble_rate(self) -> float:
        """The idle part of the longest rank's time, from its first action to its last (Qi et al., arXiv 2401.10241, section 5.3)."""
        return 1 - self._busy / max(ranks[-1].end - ranks[0].start for ranks in self.timeline)

    @property
    def _busy(self) -> float:
        return max(sum(ran.end - ran.start for ran in ranks) for ranks in self.timeline)


def simulate(plan: Plan, costs: Costs | None = None) -> Simulation:
    """Run lowered lists to their end, or raise ScheduleError."""
    check_complete(plan)
    machine = _Machine(plan, costs or Costs())
    while any(machine.advance(rank) for rank in range(len(plan))):
        pass
    if any(place < len(actions) for place, actions in zip(machine.place, plan, strict=True)):
        raise ScheduleError(f"no rank can go on; what each waits for:\n{_drawn(plan, machine.place)}")
    ones = [1] * len(places(plan))
    return Simulation(machine.timeline, peak_held(plan, ones, ones), [_count_sends(actions) for actions in plan])


def peak_held(plan: Plan, held: Sequence[N], waiting: Sequence[N]) -> list[N]:
    """The most that each rank holds at once; 0 without backwards.

    Args:
        held: what each stage holds for a micro-batch from the end of its forward to the end of its backward, or of the first part of it.
        waiting: what is left of that until its weights part has run, where there is one.
    """
    return [_peak_held(actions, held, waiting) for actions in plan]


def check_complete(plan: Plan) -> None:
    """Every stage on one rank; every forward once and in order; every backward once, in order and after its forward (or none at all);
    the same for weight parts, after their backward.
    """
    compute = [[action for action in actions if action.kind.is_compute] for actions in plan]
    stages = sorted(places(compute))
    if not stages or stages != list(range(len(stages))):
        raise ScheduleError(f"the plan runs stages {stages}: they must be numbered from 0 without a gap")
    everything = [action for actions in compute for action in actions]
    microbatches = 1 + max(action.microbatch for action in everything)
    order = (Kind.F, Kind.B, Kind.W)
    kinds = [kind for kind in order if kind is Kind.F or any(action.kind is kind for action in everything)]
    wanted = [Action(stage, kind, m) for stage in stages for kind in kinds for m in range(microbatches)]
    per_stage = sorted(everything, key=lambda action: (action.stage, order.index(action.kind)))  # stable: keeps each rank's order
    if per_stage != wanted:
        wrong = next((a for a, b in zip(per_stage, wanted, strict=False) if a != b), "an action")
        raise ScheduleError(f"{wrong} is missing, doubled, out of order or on two ranks in\n{_drawn(plan)}")
    for actions in compute:
        place = {action: i for i, action in enumerate(actions)}
        for action in actions:
            first = {Kind.B: Kind.F, Kind.W: Kind.B}.get(action.kind)
            if first and place.get(action._replace(kind=first), len(actions)) > place[action]:
                raise ScheduleError(f"{action} runs before its {first.value}, or on another rank, in\n{_drawn(plan)}")


@dataclass
class _Lane:
    """Messages one way between two ranks: the i-th sent meets the i-th receive started."""

    latency: float
    sent: deque[tuple[Action, float]] = field(default_factory=deque)  # and not yet met
    started: deque[tuple[Action, float]] = field(default_factory=deque)
    arrived: dict[Action, float] = field(default_factory=dict)  # by receive
    latest: float = 0.0

    def match(self) -> None:
        while self.sent and self.started:
            (send, sent), (receive, started) = self.sent.popleft(), self.started.popleft()
            if receive_of(send) != receive:
                raise ScheduleError(f"the two ends of a lane disagree: {send} meets {receive}")
            self.latest = max(sent + self.latency, started + self.latency, self.latest)
            self.arrived[receive] = self.latest


class _Machine:
    """Where every rank stands, and when what it waits for comes."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan, self.costs = plan, costs
        self.rank_of = places(plan)
        self.split = any(action.kind is Kind.W for actions in plan for action in actions)
        self.place = [0] * len(plan)
        self.clock = [0.0] * len(plan)
        self.timeline: list[list[Ran]] = [[] for _ in plan]
        self.ended: dict[Action, float] = {}
        self.lanes: dict[tuple[int, int], _Lane] = defaultdict(lambda: _Lane(costs.latency))

    def advance(self, rank: int) -> bool:
        """Run this rank until it must wait; whether it got anywhere."""
        begin = self.place[rank]
        while self.place[rank] < len(self.plan[rank]) and self._run(rank, self.plan[rank][self.place[rank]]):
            self.place[rank] += 1
        return self.place[rank] > begin

    def _run(self, rank: int, action: Action) -> bool:
        """Do one action if it can be done now."""
        match action.kind:
            case Kind.F | Kind.B | Kind.W:
                return self._compute(rank, action)
            case Kind.SEND_F | Kind.SEND_B:
                lane = self._lane(rank, receive_of(action))
                lane.sent.append((action, self.clock[rank]))
                lane.match()
            case Kind.RECV_F | Kind.RECV_B:
                lane = self._lane(self.rank_of[_source(action)], action)
                lane.started.append((action, self.clock[rank]))
                lane.match()
            case Kind.FREE_F | Kind.FREE_B:
                receive = receive_of(send_of_free(action))
                arrival = self._lane(rank, receive).arrived.get(receive)
                if arrival is None:
                    return False
                self.clock[rank] = max(self.clock[rank], arrival)
        return True

    def _compute(self, rank: int, action: Action) -> bool:
        ready = self._ready(rank, action)
        if ready is None:
            return False
        start = max(self.clock[rank], ready)
        self.clock[rank] = self.ended[action] = start + self.costs.of(action, split=self.split)
        self.timeline[rank].append(Ran(action, start, self.clock[rank]))
        return True

    def _ready(self, rank: int, action: Action) -> float | None:
        """When the input of a forward or backward is there; None if that is not known yet."""
        if action.kind is Kind.W:
            return self.ended[action._replace(kind=Kind.B)]
        receive = action._replace(kind=Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B)
        source = _source(receive)
        if source not in self.rank_of:
            return 0.0
        if self.rank_of[source] == rank:
            return self.ended.get(action._replace(stage=source))
        return self._lane(self.rank_of[source], receive).arrived.get(receive)

    def _lane(self, sender: int, receive: Action) -> _Lane:
        return self.lanes[sender, self.rank_of[receive.stage]]


def _source(receive: Action) -> int:
    """The stage a receive's message comes from."""
    return receive.stage + (-1 if receive.kind is Kind.RECV_F else 1)


def _peak_held(actions: Sequence[Action], held: Sequence[N], waiting: Sequence[N]) -> N:
    kinds = {action.kind for action in actions}
    if Kind.B not in kinds:
        return 0
    changes = {Kind.F: held, Kind.B: [-size for size in held]}
    if Kind.W in kinds:
        changes |= {Kind.B: [later - size for size, later in zip(held, waiting, strict=True)], Kind.W: [-size for size in waiting]}
    return max(accumulate(changes[action.kind][action.stage] for action in actions if action.kind in changes))


def _count_sends(actions: Sequence[Action]) -> int:
    return sum(action.kind in (Kind.SEND_F, Kind.SEND_B) for action in actions)


def _drawn(plan: Plan, place: Sequence[int] | None = None) -> str:
    """The plan, a line per rank, with ``<-- here`` after what each rank cannot do."""
    lines = []
    for rank, actions in enumerate(plan):
        words = list(map(str, actions))
        if place is not None and place[rank] < len(words):
            words[place[rank]] += " <-- here"
        lines.append(f"  rank {rank}: {' '.join(words)}")
    return "\n".join(lines)
