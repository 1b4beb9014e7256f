"""Only one file reads private attributes of TorchRL's objects."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.test_examples import ROOT

ADAPTER = "torchrl_replay_ext/_torchrl.py"
# Private names of other libraries, which have no public counterpart: of OmegaConf's nodes, a Gymnasium environment, and
# torch's tensors.
OTHER_LIBRARIES = {
    ("torchrl_replay_ext/cuda_graphs.py", "_version"),
    ("torchrl_replay_ext/configs.py", "_get_parent"),
    ("recipes/common/environment.py", "_destroy"),
}


def source_files() -> list[str]:
    paths = (path for folder in ("torchrl_replay_ext", "recipes") for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def is_private(name: str) -> bool:
    # these methods of named tuples are public; the pattern leaves out _AcceptedKeys, which TorchRL documents
    return bool(re.match(r"_[a-z]", name)) and name not in ("_replace", "_asdict", "_fields")


def is_own(node: ast.expr) -> bool:
    """Whether the expression is the object of the running method: self, cls or super()."""
    is_super = isinstance(node, ast.Call) and ast.unparse(node.func) == "super"
    return is_super or (isinstance(node, ast.Name) and node.id in ("self", "cls"))


def own_names(node: ast.ClassDef) -> set[str]:
    """The private names that a class defines or reads from itself."""
    return {
        name
        for part in ast.walk(node)
        for name in (
            part.attr if isinstance(part, ast.Attribute) and is_own(part.value) else "",
            part.name if isinstance(part, ast.FunctionDef) else "",
            part.target.id if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) else "",
        )
        if is_private(name)
    }


def foreign_reads(tree: ast.AST, names: frozenset[str] = frozenset()) -> Iterator[tuple[int, str, str]]:
    """Line, name and text of each private attribute of another object; ``names`` are those of the enclosing class."""
    for node in ast.iter_child_nodes(tree):
        inside = frozenset(own_names(node)) if isinstance(node, ast.ClassDef) else names
        yield from foreign_reads(node, inside)
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of_torch = ast.unparse(node.value).split(".")[0] == "torch"
            of_own_class = isinstance(node.value, ast.Name) and node.attr in names
            if not (of_torch or of_own_class or is_own(node.value)):
                yield node.lineno, node.attr, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            owner, key = node.args[:2]
            if isinstance(key, ast.Constant) and is_private(str(key.value)) and not is_own(owner):
                yield node.lineno, str(key.value), ast.unparse(node)


@pytest.mark.parametrize("file", [file for file in source_files() if file != ADAPTER])
def test_no_other_file_reads_private_attributes_of_other_objects(file):
    reads = sorted(foreign_reads(ast.parse((ROOT / file).read_text())))
    found = [f"{file}:{line}: {text}" for line, name, text in reads if (file, name) not in OTHER_LIBRARIES]
    assert not found, f"move what reads TorchRL's attributes to {ADAPTER}; give own classes a method:\n" + "\n".join(
        found
    )


def test_private_reads_are_found_in_every_form():
    code = """
class Box:
    def __init__(self): self._content = 0
    def same(self, other): return self._content == other._content
    def bad(self, storage): return storage._storage, self._content._lock, getattr(storage, "_len", 0)
def torch_only(): return torch._dynamo.config
"""
    assert [name for _, name, _ in foreign_reads(ast.parse(code))] == ["_storage", "_lock", "_len"]
