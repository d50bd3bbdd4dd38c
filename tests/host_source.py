"""The installed host's source, read and not imported.

Another test of this process may have put our classes in the place of the host's.
"""

import ast
import importlib.util
from functools import cache
from pathlib import Path

OMNI = "vllm_omni"
ADAPTERS = "entrypoints/openai/tts_adapters"


@cache
def host_dir(package=OMNI):
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def text_of(path, package=OMNI):
    return (host_dir(package) / path).read_text()


@cache
def tree_of(path, package=OMNI):
    return ast.parse(text_of(path, package))


def code_of(path, package=OMNI):
    """Its code as Python spells it, however it is formatted."""
    return ast.unparse(tree_of(path, package))


def definition(body, name, kinds):
    """The last one wins, as when Python runs it."""
    found = [node for node in body if isinstance(node, kinds) and node.name == name]
    return found[-1] if found else None


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def class_in(path, name, package=OMNI):
    node = definition(tree_of(path, package).body, name, (ast.ClassDef,))
    assert node is not None, f"seam {path}: class {name} is gone"
    return node


def bases_of(path, name):
    return [ast.unparse(base) for base in class_in(path, name).bases]


def method_in(path, class_name, name):
    node = definition(class_in(path, class_name).body, name, FUNCTIONS)
    assert node is not None, f"seam {path}: {class_name}.{name} is gone"
    return node


def parameters(function):
    arguments = function.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return [argument.arg for argument in every if argument.arg != "self"]


def source(path, class_name, name):
    return ast.unparse(method_in(path, class_name, name))


def calls_in(path, class_name, name, called):
    """The calls of something within a method, as Python spells what is called."""
    body = ast.walk(method_in(path, class_name, name))
    calls = [node for node in body if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == called]
