"""Records into files, ratios, tables and verdicts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rank import Record

MEGA = 1e6


@dataclass(frozen=True)
class Results:
    """A run: how it was set, and what each variant showed."""

    setting: dict[str, Any]
    records: dict[str, Record]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"setting": self.setting, "variants": {name: asdict(record) for name, record in self.records.items()}}))

    @classmethod
    def read(cls, path: Path) -> Results:
        content = json.loads(path.read_text())
        return cls(content["setting"], {name: Record(**fields) for name, fields in content["variants"].items()})


class Spread(NamedTuple):
    low: float  # first quartile
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high)


@dataclass(frozen=True)
class Limit:
    """What a variant may cost of the anchor's ``measure``, ``cpus`` or ``walls``."""

    variant: str
    measure: str
    ratio: float


def paired_ratio(values: Sequence[float], anchor: Sequence[float]) -> Spread:
    """The spread over rounds of a variant's cost over the anchor's in the same round."""
    return Spread.of([value / base for value, base in zip(values, anchor, strict=True)])


def loss_difference(record: Record, reference: Record) -> float:
    return max(abs(mine - theirs) for mine, theirs in zip(record.losses, reference.losses, strict=True))


def table(records: Mapping[str, Record], anchor: str, formulas: Mapping[str, float]) -> str:
    """A line per variant. ``formulas``: bytes of state that each needs on a rank."""
    ran = {name: record for name, record in records.items() if record.skipped is None}
    base, reference = ran.get(anchor), ran.get("single") or ran.get(anchor)
    cost = ["[q1, q3]", f"/ {anchor}", "[q1, q3]"]
    rows = [["variant", "CPU ms", *cost, "wall ms", *cost, "state MB", "of formula", "heap MB", "wire MB", "traced MB", "loss diff"]]
    for name, record in ran.items():
        state = max(record.state_bytes)
        rows.append(
            [
                name,
                *cost_cells(record.cpus, base and base.cpus),
                *cost_cells(record.walls, base and base.walls),
                f"{state / MEGA:.1f}",
                f"{state / formulas[name]:.3f}",
                f"{max(record.heap_bytes) / MEGA:.1f}",
                f"{min(record.wires) / MEGA:.1f}" if record.wires else "-",
                "-" if record.traced_bytes is None else f"{record.traced_bytes / MEGA:.1f}",
                f"{loss_difference(record, reference):.0e}" if reference else "-",
            ]
        )
    skipped = [f"{name}: skipped: {record.skipped}" for name, record in records.items() if record.skipped is not None]
    return "\n".join([aligned(rows), *skipped])


def cost_cells(seconds: Sequence[float], anchor: Sequence[float] | None) -> list[str]:
    """Four cells: median and quartiles in milliseconds, and of the ratio to the anchor in the same round."""
    if not seconds:
        return ["-"] * 4
    low, middle, high = Spread.of(seconds)
    cells = [_ms(middle), f"[{_ms(low)}, {_ms(high)}]"]
    if not anchor:
        return [*cells, "-", "-"]
    ratio = paired_ratio(seconds, anchor)
    return [*cells, f"{ratio.median:.3f}", f"[{ratio.low:.2f}, {ratio.high:.2f}]"]


def overheads(records: Mapping[str, Record], pairs: Mapping[str, str]) -> str:
    """For each (variant, what it is built on) that ran: what the one costs over the other."""
    rows = [["over", "CPU", "[q1, q3]", "wall", "[q1, q3]"]]
    for name, base in pairs.items():
        if all(key in records and records[key].walls for key in (name, base)):
            row = [f"{name} / {base}"]
            for measure in ("cpus", "walls"):
                ratio = paired_ratio(getattr(records[name], measure), getattr(records[base], measure))
                row += [f"{ratio.median:.3f}", f"[{ratio.low:.3f}, {ratio.high:.3f}]"]
            rows.append(row)
    return aligned(rows) if len(rows) > 1 else ""


def verdicts(records: Mapping[str, Record], anchor: str, limits: Sequence[Limit]) -> tuple[list[str], bool]:
    """A line for each limit, and whether all that could be judged were kept."""
    lines, passed = [], True
    for limit in limits:
        record, what = (
            records.get(limit.variant),
            f"{limit.variant}: {limit.measure.removesuffix('s')} at most {limit.ratio:.2f} of {anchor}",
        )
        if record is None or not record.walls or anchor not in records or not records[anchor].walls:
            lines.append(f"  none  {what}: did not run")
            continue
        ratio = paired_ratio(getattr(record, limit.measure), getattr(records[anchor], limit.measure))
        kept = ratio.median <= limit.ratio
        passed &= kept
        lines.append(f"  {'pass' if kept else 'MISS'}  {what}: {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]")
    return lines, passed


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"
