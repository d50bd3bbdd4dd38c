"""List what this package uses of the host, and what of it another version changed.

usage: scripts/host_diff.py OLD NEW [--all]     (or: make host-diff OLD=0.30 NEW=0.32)

OLD and NEW are folders in which vllm and vllm_omni lie, as site-packages or unpacked
wheels, or the versions of environments that `make setup HOST=...` has built. Nothing is
imported: a host that does not run here can be compared as well. The seams are

* imports: each name that a module of this package imports from the host;
* overrides: what a class of ours defines that a class of the host's, above it, has too;
* super: what such a class calls by ``super()``;
* reads: what it reads of ``self`` that only the host sets;
* patches: what a list of `Patch` names;
* new: methods that the host has added to a class above one of ours. It may call them
  where it called nothing before, and ours do not know of them.
"""

import argparse
import ast
import difflib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path("vllm_tts_cache")
HOSTS = ("vllm", "vllm_omni")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Name = tuple[str, str]  # a module, and a name in it


@dataclass(frozen=True, eq=False)
class Found:
    """A name of the host: where it is, and what its source is."""

    file: Path
    node: ast.AST | None

    @property
    def line(self) -> int:
        """The line it begins on; 0 of a module."""
        return getattr(self.node, "lineno", 0)

    @property
    def source(self) -> str:
        """Its text."""
        lines, _ = parsed(self.file)
        if self.node is None:
            return "\n".join(lines)
        end = getattr(self.node, "end_lineno", self.line)
        return "\n".join(lines[self.line - 1 : end])

    @property
    def signature(self) -> str | None:
        """The arguments of a function."""
        if isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return f"({ast.unparse(self.node.args)})"
        return None


@cache
def parsed(file: Path) -> tuple[list[str], ast.Module]:
    """Return a file's lines and tree."""
    text = file.read_text("utf-8")
    return text.split("\n"), ast.parse(text)


@dataclass(frozen=True, eq=False)
class Host:
    """One version of the host, as source."""

    root: Path

    def shown(self, found: Found | None) -> str:
        """Return where a name is, for people."""
        if found is None:
            return "-"
        return f"{found.file.relative_to(self.root)}:{found.line}"

    def file_of(self, module: str) -> Path | None:
        """Return the file of a module."""
        path = self.root.joinpath(*module.split("."))
        tried = (path.with_suffix(".py"), path / "__init__.py")
        return next((file for file in tried if file.is_file()), None)

    def module_of(self, file: Path) -> str:
        """Return the module of a file."""
        parts = file.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def find(self, module: str, name: str, depth: int = 0) -> Found | None:
        """Return what a name means in a module, through imports of other modules."""
        if (file := self.file_of(module)) is None or depth > 6:
            return None
        for node in top_level(parsed(file)[1].body):
            if isinstance(node, Definition) and node.name == name:
                return Found(file, node)
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in assigned(node):
                return Found(file, node)
            if isinstance(node, ast.ImportFrom | ast.Import):
                source = imported(node, self.module_of(file), file).get(name)
                if source is None:
                    continue
                if source[0].split(".")[0] not in HOSTS:
                    return Found(file, node)
                if (found := self.resolve(source, depth + 1)) is not None:
                    return found
        sub = self.file_of(f"{module}.{name}")
        return None if sub is None else Found(sub, None)

    def resolve(self, source: Name, depth: int = 0) -> Found | None:
        """Return a module, or a name in one."""
        module, name = source
        if name:
            return self.find(module, name, depth)
        file = self.file_of(module)
        return None if file is None else Found(file, None)

    def members(self, source: Name, depth: int = 0) -> dict[str, Found]:
        """Return what a class and those above it define, and set on ``self``."""
        found = self.resolve(source)
        members: dict[str, Found] = {}
        if found is None or not isinstance(found.node, ast.ClassDef) or depth > 8:
            return members
        module = self.module_of(found.file)
        for base in reversed(found.node.bases):
            plain = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(plain, ast.Name):
                members |= self.members((module, plain.id), depth + 1)
        own = {
            name: Found(found.file, node)
            for node in found.node.body
            for name in defined(node)
        }
        set_on_self = {
            target.attr: Found(found.file, node)
            for node in ast.walk(found.node)
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in targets(node)
            if isinstance(target, ast.Attribute) and is_self(target.value)
        }
        return {**members, **set_on_self, **own}


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements, also those in its conditions."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from top_level([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            caught = [each for handler in node.handlers for each in handler.body]
            yield from top_level([*node.body, *caught, *node.orelse, *node.finalbody])


def targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    """Return what is assigned."""
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def assigned(node: ast.Assign | ast.AnnAssign) -> set[str]:
    """Return the names that are assigned."""
    return {each.id for each in targets(node) if isinstance(each, ast.Name)}


def defined(node: ast.stmt) -> set[str]:
    """Return the names that a statement in a class defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return assigned(node)
    return set()


def is_self(node: ast.expr) -> bool:
    """Tell whether an expression is the object of a method."""
    return isinstance(node, ast.Name) and node.id in ("self", "instance")


def imported(
    node: ast.ImportFrom | ast.Import, module: str, file: Path
) -> dict[str, Name]:
    """Return what an import binds; of a module the name is empty."""
    if isinstance(node, ast.Import):
        whole = {each.asname: each.name for each in node.names if each.asname}
        plain = {each.name.split(".")[0] for each in node.names if not each.asname}
        both = [*whole.items(), *((name, name) for name in plain)]
        return {shown: (name, "") for shown, name in both}
    source = node.module or ""
    if node.level:
        parts = module.split(".")
        if file.name == "__init__.py":
            parts = [*parts, ""]
        above = ".".join(parts[: -node.level])
        source = f"{above}.{source}" if source else above
    return {each.asname or each.name: (source, each.name) for each in node.names}


class Ours:
    """This package, as source."""

    def __init__(self) -> None:
        self.files = sorted(PACKAGE.rglob("*.py"))
        self.names: dict[str, dict[str, Name]] = {}
        self.classes: dict[Name, ast.ClassDef] = {}
        for file in self.files:
            module = self.module_of(file)
            bound: dict[str, Name] = {}
            for node in ast.walk(parsed(file)[1]):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    bound |= imported(node, module, file)
                elif isinstance(node, ast.ClassDef):
                    self.classes[module, node.name] = node
            self.names[module] = bound

    def module_of(self, file: Path) -> str:
        """Return the module of a file."""
        parts = file.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def imports(self) -> dict[Name, list[str]]:
        """Return what is imported from the host, and by which lines."""
        found: dict[Name, list[str]] = {}
        for file in self.files:
            module = self.module_of(file)
            for node in ast.walk(parsed(file)[1]):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    for source in imported(node, module, file).values():
                        if source[0].split(".")[0] in HOSTS:
                            where = f"{file.relative_to(PACKAGE)}:{node.lineno}"
                            found.setdefault(source, []).append(where)
        return dict(sorted(found.items()))

    def patches(self) -> list[tuple[Name, str]]:
        """Return the class or module, and the attribute, that each `Patch` names."""
        found = []
        for file in self.files:
            for node in ast.walk(parsed(file)[1]):
                is_call = isinstance(node, ast.Call) and ast.unparse(node.func)
                if is_call != "Patch" or not isinstance(node, ast.Call):
                    continue
                owner, names, *_ = (ast.literal_eval(each) for each in node.args[:2])
                if owner.split(".")[0] in HOSTS:
                    module, _, last = owner.rpartition(".")
                    is_class = last[0].isupper()
                    source = (module, last) if is_class else (owner, "")
                    found += [(source, name) for name in names.split()]
        return found

    def line_of(self, key: Name) -> list[Name]:
        """Return a class of ours and those of ours above it."""
        above = [self._meant(key[0], base) for base in self.classes[key].bases]
        own = [base for base in above if base in self.classes]
        return [key, *(each for base in own if base for each in self.line_of(base))]

    def hosts_above(self, key: Name) -> list[Name]:
        """Return the host's classes from which a class of ours inherits."""
        found = [
            base
            for each in self.line_of(key)
            for node in self.classes[each].bases
            if (base := self._meant(each[0], node)) is not None
            and base[0].split(".")[0] in HOSTS
        ]
        return list(dict.fromkeys(found))

    def _meant(self, module: str, base: ast.expr) -> Name | None:
        if isinstance(base, ast.Subscript):
            base = base.value
        if isinstance(base, ast.Name):
            if (module, base.id) in self.classes:
                return module, base.id
            return self.names[module].get(base.id)
        if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
            source = self.names[module].get(base.value.id)
            return source and (".".join(filter(None, source)), base.attr)
        return None

    def used(self, key: Name) -> tuple[set[str], set[str], set[str]]:
        """Return what a class of ours defines, calls by ``super()`` and reads."""
        own: set[str] = set()
        above: set[str] = set()
        read: set[str] = set()
        for each in self.line_of(key):
            for node in self.classes[each].body:
                has_value = not isinstance(node, ast.AnnAssign) or node.value
                own |= defined(node) if has_value else set()
            for node in ast.walk(self.classes[each]):
                if isinstance(node, ast.Attribute):
                    if is_self(node.value):
                        read.add(node.attr)
                    elif ast.unparse(node.value).startswith("super("):
                        above.add(node.attr)
        return own, above, read - own


def compared(old: Found | None, new: Found | None) -> str:
    """Say what became of a name."""
    if old is None or new is None:
        return "unknown" if old is new else "added" if old is None else "GONE"
    if old.source == new.source:
        return "same"
    if old.signature != new.signature:
        return "SIGNATURE"
    before, after = old.source.splitlines(), new.source.splitlines()
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))
    return f"changed ({sum(line[:1] in '+-' for line in lines) - 2})"


def seams(old: Host, new: Host) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield kind, name, what became of it, and where it is in either version."""
    ours = Ours()
    for source, where in ours.imports().items():
        found = old.resolve(source), new.resolve(source)
        name = f"{'.'.join(filter(None, source))}  <- {', '.join(where)}"
        yield "import", name, compared(*found), *shown(old, new, *found)
    for source, name in ours.patches():
        found = of(old, source, name), of(new, source, name)
        full = f"{'.'.join(filter(None, source))}.{name}"
        yield "patch", full, compared(*found), *shown(old, new, *found)
    told: set[str] = set()
    for key in sorted(ours.classes):
        before: dict[str, Found] = {}
        after: dict[str, Found] = {}
        for base in reversed(ours.hosts_above(key)):
            before |= old.members(base)
            after |= new.members(base)
        own, above, read = ours.used(key)
        for kind, names in (("override", own), ("super", above), ("read", read)):
            for name in sorted(names & (before.keys() | after.keys())):
                found = before.get(name), after.get(name)
                full = f"{'.'.join(key)}.{name}"
                yield kind, full, compared(*found), *shown(old, new, *found)
        for name in sorted(after.keys() - before.keys() - own):
            is_method = after[name].signature is not None
            where = new.shown(after[name])
            if is_method and where not in told:
                told.add(where)
                yield "new", f"{'.'.join(key)}.{name}", "added", "-", where


def of(host: Host, source: Name, name: str) -> Found | None:
    """Return an attribute of a module or a class of the host."""
    if not source[1]:
        return host.find(source[0], name)
    return host.members(source).get(name)


def shown(
    old: Host, new: Host, before: Found | None, after: Found | None
) -> tuple[str, str]:
    """Return where a name is in either version."""
    return old.shown(before), new.shown(after)


def host(named: str) -> Host:
    """Return the host of a folder, or of an environment's version."""
    if (Path(named) / "vllm_omni").is_dir():
        return Host(Path(named))
    for venv in (Path(f".venv-{named}"), Path(".venv")):
        for site in sorted(venv.glob("lib/python*/site-packages")):
            if list(site.glob(f"vllm_omni-{named}*.dist-info")):
                return Host(site)
    sys.exit(
        f"{named}: no folder with vllm_omni, and no environment of this version; run "
        f"make setup HOST={named}"
    )


def main() -> None:
    """Print the seams that differ, or all of them, and how many there are."""
    parser = argparse.ArgumentParser(description="What the host changed for us.")
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument("--all", action="store_true", help="also what is the same")
    given = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    for kind, name, became, before, after in seams(host(given.old), host(given.new)):
        counts[kind, became.split(" ")[0]] += 1
        if given.all or became not in ("same", "unknown"):
            print(f"{kind:9}{became:15}{name}\n{'':24}{before} -> {after}")
    for (kind, became), count in sorted(counts.items()):
        print(f"{count:5} {kind} {became}")


if __name__ == "__main__":
    main()
