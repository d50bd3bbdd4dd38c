"""The page beside the others: each cell of ours has its tests, of theirs its source."""

import ast
import re
from pathlib import Path

import pytest

from vllm_tts_cache.speaker.family import families

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "comparison.md"
OTHERS = (
    "vLLM-Omni 0.30",
    "SGLang-Omni 0.1.9",
    "fish-speech's server",
    "ElevenLabs",
    "Cartesia",
)
# Of what was looked for in vain there is no source.
WITHOUT_SOURCE = ("not found", "does not arise")
SOURCE = re.compile(r"\[([VGFEC]\d+)\]")


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables():
    """All tables of the page: heading cells, and the rows' cells."""
    for block in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE):
        heading, _, *rows = map(cells, block.splitlines())
        yield heading, rows


def compared():
    """The rows of the comparison by name, each with its cells by whose they are."""
    rows = {}
    for heading, lines in tables():
        if heading[1] == "vllm-tts-cache":
            for name, *row in lines:
                assert name not in rows
                rows[name] = dict(zip(heading[1:], row, strict=True))
    return rows


def second_column(heading):
    """The rows of the one table with this heading: first cell to second."""
    [rows] = [rows for found, rows in tables() if found == heading]
    return {row[0]: row[1] for row in rows}


def functions_of(path):
    tree = ast.parse((ROOT / path).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


ROWS = compared()
EVIDENCE = second_column(["row", "tests"])


def test_everybody_stands_in_every_row():
    assert len(ROWS) > 20
    for row in ROWS.values():
        assert tuple(row) == ("vllm-tts-cache", *OTHERS)
        assert all(row.values())


def test_each_cell_of_ours_names_its_tests():
    assert list(EVIDENCE) == list(ROWS)


@pytest.mark.parametrize("row", EVIDENCE)
def test_the_tests_that_are_named_are_there(row):
    named = re.findall(r"`([^`]+)`", EVIDENCE[row])
    assert named
    for test in named:
        path, name = test.split("::")
        assert name.startswith("test_")
        assert name in functions_of(path), test


@pytest.mark.parametrize("row", ROWS)
def test_each_cell_of_theirs_names_its_source(row):
    for other in OTHERS:
        cell = ROWS[row][other]
        assert SOURCE.search(cell) or cell in WITHOUT_SOURCE, (other, cell)


def test_each_source_is_described_linked_and_used():
    text = PAGE.read_text()
    used = {key for row in ROWS.values() for key in SOURCE.findall(str(row))}
    linked = set(re.findall(r"^\[(\w+)\]: \S+$", text, re.MULTILINE))
    [sources] = [rows for heading, rows in tables() if heading[1:] == ["what", "of"]]
    assert used == linked == {key.strip("[]") for key, _, _ in sources}


def test_figures_are_those_of_the_performance_page():
    row = ROWS["What running streams feel of a new voice"]
    measured = (ROOT / "docs" / "performance.md").read_text()
    for whose in ("vllm-tts-cache", "vLLM-Omni 0.30"):
        figures = re.findall(r"\d+(?:\.\d+)?(?: s|x)\b", row[whose])
        assert len(figures) >= 3
        for figure in figures:
            assert figure in measured, figure


def test_as_many_clips_as_the_page_says_make_a_voice():
    several = {family.title: family.max_clips for family in families()}
    several = {title: number for title, number in several.items() if number > 1}
    assert several == {"Fish Speech": 10}
    cell = ROWS["Several clips to a voice"]["vllm-tts-cache"]
    assert cell == "on Fish Speech up to 10; elsewhere more than one are a 400"


def test_as_many_families_clone_as_the_page_says():
    ours = [f for f in families() if f.modes and f.name in family_folders()]
    cell = ROWS["Models and languages"]["vllm-tts-cache"]
    assert cell.startswith(f"{len(ours)} families")


def family_folders():
    return {
        path.parent.name
        for path in (ROOT / "vllm_tts_cache" / "families").glob("*/family.py")
    }


def test_the_licence_is_the_one_that_the_package_declares():
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence and "Version 2.0" in licence
