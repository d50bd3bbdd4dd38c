"""Print how large the house is, and hold it to the budgets of `[tool.house]`.

A count above its budget fails. So does one that lies far below it: then the commit
that made it so lowers the budget, that nothing spends again what was saved. The hops of
a flow are counted by tests/contract/test_hops.py, and held to the same table there;
`make house` runs both.

usage: python scripts/house.py
"""

import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grimp
import networkx as nx

ROOT = Path(__file__).parent.parent
PACKAGE = "vllm_tts_cache"
HOST = ("vllm", "vllm_omni")


def budgets() -> dict[str, Any]:
    """Return the table of budgets, which the one of hops is in."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["house"]


def is_far_below(found: int, budget: int) -> bool:
    """Whether a budget is to be lowered; a small cut need not touch it."""
    return found < budget - max(1, budgets()["slack"] * budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """What is counted.

    Attributes:
        lines: Module -> lines, `__init__` modules with their folder's name.
        generic: Modules that are of no family, without those of folders.
        test_lines: Lines of all Python files of tests.
        circles: Modules that import one another in a circle.
        host_rooms: Generic modules that import the host.
    """

    lines: dict[str, int]
    generic: set[str]
    test_lines: int
    circles: list[list[str]]
    host_rooms: list[str]

    def counts(self) -> dict[str, int]:
        """Return what has a budget."""
        return {
            "generic_modules": len(self.generic),
            "package_lines": sum(self.lines.values()),
            "test_lines": self.test_lines,
            "import_circles": len(self.circles),
            "host_importers": len(self.host_rooms),
        }


def survey() -> House:
    """Count what is there now."""
    sys.path.insert(0, str(ROOT))  # of this checkout, whichever is installed
    files = list((ROOT / PACKAGE).rglob("*.py"))
    graph = grimp.build_graph(PACKAGE, include_external_packages=True, cache_dir=None)
    arrows = nx.DiGraph(
        (module, other)
        for module in graph.modules
        for other in graph.find_modules_directly_imported_by(module)
    )
    importers = set().union(*map(graph.find_modules_that_directly_import, HOST))
    generic = {module_of(file) for file in files if is_generic(file)}
    return House(
        lines={module_of(file): num_lines(file) for file in files},
        generic=generic,
        test_lines=sum(map(num_lines, (ROOT / "tests").rglob("*.py"))),
        circles=[
            sorted(circle)
            for circle in nx.strongly_connected_components(arrows)
            if len(circle) > 1
        ],
        host_rooms=sorted(generic & importers),
    )


def module_of(file: Path) -> str:
    """Name a file as Python does."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def is_generic(file: Path) -> bool:
    """Whether a module is of no family, and more than a docstring."""
    of_family = ROOT / PACKAGE / "families" in file.parents
    return file.name != "__init__.py" and not of_family


def num_lines(file: Path) -> int:
    """Count the lines of a file."""
    return len(file.read_text("utf-8").splitlines())


def folder_of(module: str) -> str:
    """Name the folder of the package that a module is in; of the API process a room."""
    parts = module.split(".")[1:-1]
    depth = 2 if parts[:1] == ["entrypoints"] else 1
    return "/".join(parts[:depth]) or "(top)"


def described(house: House) -> Iterator[str]:
    """Give the lines that say how large it is."""
    lines, modules = Counter[str](), Counter[str]()
    for module, num in house.lines.items():
        lines[folder_of(module)] += num
        modules[folder_of(module)] += module in house.generic
    yield f"{'folder':24} {'modules':>8} {'lines':>8}"
    for folder, num in sorted(lines.items()):
        yield f"{folder:24} {modules[folder] or '-':>8} {num:8,}"
    longest = max(house.lines, key=lambda module: house.lines[module])
    yield f"The longest file is {longest}: {house.lines[longest]} lines."
    for circle in house.circles:
        yield f"In a circle: {', '.join(circle)}"
    yield "These import the host: " + ", ".join(
        module.removeprefix(f"{PACKAGE}.") for module in house.host_rooms
    )


def compared(counts: dict[str, int], table: dict[str, Any]) -> Iterator[str]:
    """Give a line for each count, with its budget."""
    for name, found in counts.items():
        yield f"{name:24} {found:8,}   budget {table[name]:8,}"


def problems(counts: dict[str, int], table: dict[str, Any]) -> Iterator[str]:
    """Give what is wrong, and what to do."""
    for name, found in counts.items():
        budget = table[name]
        if found > budget:
            yield f"{name} is {found}, above its budget of {budget}: cut or merge."
        elif is_far_below(found, budget):
            yield f"{name} is {found}: lower its budget of {budget} in pyproject.toml."


def main() -> int:
    """Print it all; 1 if a budget does not hold."""
    house, table = survey(), budgets()
    counts = house.counts()
    wrong = list(problems(counts, table))
    for line in (*described(house), *compared(counts, table)):
        sys.stdout.write(f"{line}\n")
    sys.stderr.writelines(f"house: {line}\n" for line in wrong)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
