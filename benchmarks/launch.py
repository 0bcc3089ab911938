"""Start the ranks of a benchmark, on the machine's loopback or on a link of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

HOST, PRIVATE = "host", "private"

_LINK_UP = "ip link set lo up"
_SHAPE = "tc qdisc add dev lo root tbf rate {rate} burst 512kb latency 200ms"


def launch(module: str, arguments: Sequence[str], *, ranks: int, link: str = HOST) -> int:
    """Run ``python -m module *arguments`` on ``ranks`` gloo ranks of one thread each; its exit status.

    Args:
        link: ``host``: the machine's loopback, which other programs use as well. ``private``: the loopback of a network namespace
            that lasts as long as the command. Else that, throttled to this rate (``4gbit``, as tc spells it). Namespaces need Linux
            and root (or user namespaces, for ``private``), and the commands unshare, ip and tc (util-linux, iproute2).
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks), "-m", module, *arguments]
    if link != HOST:
        command = _in_namespace(command, link)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.call(command, env=os.environ | threads | {"GLOO_SOCKET_IFNAME": "lo"})


def _in_namespace(command: list[str], link: str) -> list[str]:
    steps = [_LINK_UP] if link == PRIVATE else [_LINK_UP, _SHAPE.format(rate=link)]
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
    return [*unshare, "sh", "-c", " && ".join([*steps, 'exec "$@"']), "sh", *command]
