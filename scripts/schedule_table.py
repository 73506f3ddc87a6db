"""Prints the README's table of schedules in Markdown."""

from __future__ import annotations

from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.simulator import simulate

DEVICES, MICROBATCHES = 8, 32


def main() -> None:
    for family in families():
        mark = " \\*" if family.simulated_only else ""
        timeline = simulate(build_schedule(family.name, num_devices=DEVICES, num_microbatches=MICROBATCHES))
        print(
            f"| `{family.name}`{mark} | {family.placement} | {timeline.peak:.3f} | {timeline.bubble_rate:.1%} "
            f"| {timeline.messages} | {family.source.split(';')[0]} |"
        )


if __name__ == "__main__":
    main()
