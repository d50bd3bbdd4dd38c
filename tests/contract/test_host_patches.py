"""What we replace of the host from outside stands in two lists, with its reason."""

import ast
import pkgutil
from pathlib import Path

import pytest

import vllm_tts_cache
from vllm_tts_cache.entrypoints import attach
from vllm_tts_cache.model_executor import rpc_methods

PACKAGE = Path(vllm_tts_cache.__file__).parent
PATCHES = (*attach.PATCHES, *rpc_methods.PATCHES)
LISTED = {f"{each.owner}.{name}" for each in PATCHES for name in each.names.split()}
FOREIGN = ("vllm", "vllm_omni", "torch", "transformers")
SETTINGS = ("torch.backends.",)  # which torch documents as ours to set
ADDED = {"vllm_omni.entrypoints.omni.Omni.collective_rpc"}
# What gives a class of the host's methods of ours.
ADDING = "_install_on"
SLEEPING = ("sleep", "discard", "wake_up")


def foreign_names(tree):
    """What a module's names stand for that it imports from others, anywhere in it."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for each in node.names:
                names[each.asname or each.name] = f"{node.module}.{each.name}"
        elif isinstance(node, ast.Import):
            for each in node.names:
                shown = each.asname or each.name.partition(".")[0]
                names[shown] = each.name if each.asname else shown
    return {k: v for k, v in names.items() if v.partition(".")[0] in FOREIGN}


def dotted(node, names):
    """The foreign thing that an expression names; None if it names none."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value, names)):
        return f"{owner}.{node.attr}"
    return None


def patched_in(source):
    """The attributes of others that a module assigns, deletes or has replaced."""
    tree = ast.parse(source)
    names, found = foreign_names(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            found.add(dotted(node, names))
        elif isinstance(node, ast.Call) and node.args:
            called, owner = ast.unparse(node.func), dotted(node.args[0], names)
            if owner and called in ("setattr", "patch_once", "delattr"):
                name = node.args[1]
                assert isinstance(name, ast.Constant), ast.unparse(node)
                found.add(f"{owner}.{name.value}")
            elif owner and called == ADDING:
                found |= {f"{owner}.{name}" for name in SLEEPING}
    return {each for each in found - {None} if not each.startswith(SETTINGS)}


def patched():
    return {
        target: str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        for target in patched_in(file.read_text("utf-8"))
    }


def test_whatever_is_patched_is_listed():
    unlisted = {k: v for k, v in patched().items() if k not in LISTED}
    assert unlisted == {}, "add it to attach.PATCHES or rpc_methods.PATCHES"


def test_whatever_is_listed_is_patched():
    """But for the methods of one engine client, which no source names by its class."""
    of_one = {name for name in LISTED if ".AsyncOmni." in name}
    assert LISTED - of_one == set(patched())


@pytest.mark.parametrize("target", sorted(LISTED - ADDED))
def test_seam_the_host_has_what_is_listed(target):
    owner, _, name = target.rpartition(".")
    assert hasattr(pkgutil.resolve_name(owner), name) or name in SLEEPING
