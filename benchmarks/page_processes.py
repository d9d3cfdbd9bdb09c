"""The section of docs/benchmarks.md on failures of several processes."""

import statistics


def recovery_words(parts: list[dict]) -> str:
    """What the failures of measured jobs cost."""
    words = [
        f"With a failure every {part['every']:.0f} s ({part['failures']} in {part['minutes']:.0f} minutes)"
        f" and a checkpoint every {part['steps'] / part['saves']:.0f} steps the first new step came"
        f" {part['seconds_median']:.1f} s after the death in the median and {part['seconds_max']:.1f} s at"
        f" most, {statistics.mean(part['repeated']):.1f} steps were repeated, and {100 * part['ettr']:.0f} %"
        " of the time was training whose results were kept."
        for part in parts
    ]
    first = parts[0]
    return (
        f"A job of {first['processes']} processes with a core each, size {first['size']}, under `torchrun"
        " --max-restarts`; a process that is drawn by chance is killed without warning."
        f" {' '.join(words)} A step takes {first['step_seconds']:.2f} s; a checkpoint is"
        f" written in {first['written']:.1f} s."
    )
