"""The private names of TorchRL that the project uses, and the files that may use them."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrl
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import Sampler, TensorDictRoundRobinWriter
from torchrl.data.replay_buffers.ray_buffer import _RayReplayBufferClient
from torchrl.objectives import LossModule
from torchrl.objectives.value import ValueEstimatorBase

from tests.params import module_names

ROOT = Path(__file__).parent.parent
ADAPTER = "torchrl_replay_ext/_torchrl.py"


def words(text: str) -> set[str]:
    return set(text.split())


# The private names of TorchRL that a subclass overrides or inherits, by class. Those of the adapter are read there.
INHERITED = {
    "LazyTensorStorage": words(
        """
        _empty _get_new_len _init _last_cursor _last_cursor_index _last_cursor_index_value _len _len_value
        _mutation_revision_value _rand_given_ndim _rng _set_last_cursor _storage _total_shape
        """
    ),
    "TensorDictRoundRobinWriter": words(
        """
        _cursor _empty _mark_update_entities _replicate_index _rng _storage _write_count _write_count_value
        """
    ),
    "TensorDictReplayBuffer": words(
        """
        _batch_size _collate_fn _get_priority_vector _init _pin_memory _prefetch _replay_lock _sample
        _sample_unit _sampler _set_index_in_td _storage _transform _transpose _write_lock _writer
        """
    ),
    "Sampler": words("_empty _rng"),
    "LossModule": words(
        """
        _all_schedulable_buffers _clear_weakrefs _forward_value_estimator_keys _loss_mask_keys
        _maybe_get_priority_weight _reduce_loss
        """
    ),
    "ValueEstimatorBase": words("_get_time_dim"),
}
# Names that torchrl 0.14 does not have. They are used only where they exist.
LATER = {"TensorDictReplayBuffer": {"_increment_counter", "_notify_replay_state_change"}}
HAS_LATER_NAMES = hasattr(TensorDictReplayBuffer, "wait_until_sampleable")

# Private names of other libraries, which have no public counterpart: of OmegaConf's nodes, a Gymnasium environment, and
# torch's tensors.
OTHER_LIBRARIES = {
    ("torchrl_replay_ext/cuda_graphs.py", "_version"),
    ("torchrl_replay_ext/configs.py", "_get_parent"),
    ("recipes/common/environment.py", "_destroy"),
}


@pytest.fixture(scope="module")
def owners() -> dict[str, Any]:
    """An object of each class whose private names are used, in the state in which the project uses it."""

    class AnySampler(Sampler):
        sample = dumps = loads = state_dict = load_state_dict = _empty = lambda self, *args: None

    storage, writer = LazyTensorStorage(4, compilable=True), TensorDictRoundRobinWriter(compilable=True)
    data = TensorDict(observation=torch.zeros(3), batch_size=[3])
    buffer = TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=2)
    buffer.extend(data)
    return {
        "LazyTensorStorage": storage,
        "TensorDictRoundRobinWriter": writer,
        "TensorDictReplayBuffer": buffer,
        "TensorDict": data,
        "Sampler": AnySampler(),
        "LossModule": LossModule,
        "ValueEstimatorBase": ValueEstimatorBase,
        "_RayReplayBufferClient": _RayReplayBufferClient(None, has_gpu=False),
    }


def source_files() -> list[str]:
    paths = (path for folder in ("torchrl_replay_ext", "recipes") for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def users_of(name: str) -> str:
    return ", ".join(file for file in source_files() if re.search(rf"\b{name}\b", (ROOT / file).read_text()))


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


def package_classes() -> set[type]:
    # an import of "configs" or "plugins" would register configurations with Hydra for all tests of the process
    names = [name for name in module_names() if name.split(".")[1] not in ("configs", "plugins")]
    members = [member for name in names for member in vars(importlib.import_module(name)).values()]
    return {member for member in members if inspect.isclass(member) and member.__module__ in names}


def test_torchrl_still_has_every_private_name_that_the_project_uses(owners):
    missing = [
        f"{owner}.{name}, used in {users_of(name)}"
        for table in (INHERITED, LATER if HAS_LATER_NAMES else {})
        for owner, names in table.items()
        for name in sorted(names)
        if not hasattr(owners[owner], name)
    ]
    read = {name for _, name, _ in foreign_reads(ast.parse((ROOT / ADAPTER).read_text()))}.difference(*LATER.values())
    assert len(read) > 20
    missing += [f"{name}, used in {ADAPTER}" for name in read if not any(hasattr(x, name) for x in owners.values())]
    assert not missing, f"torchrl {torchrl.__version__} has no longer:\n" + "\n".join(missing)


def test_every_private_name_that_a_subclass_inherits_or_overrides_is_listed(owners):
    unlisted = set()
    for cls in package_classes():
        owner = next((base.__name__ for base in cls.__mro__ if base.__name__ in INHERITED), None)
        if owner is not None:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
            assert isinstance(tree, ast.ClassDef)
            used = {name for name in own_names(tree) if hasattr(owners[owner], name)}
            unlisted |= {
                f"{cls.__module__}.{cls.__name__}: {owner}.{name}"
                for name in used - INHERITED[owner] - LATER.get(owner, set())
            }
    assert not unlisted, "add to INHERITED in tests/test_torchrl.py, or rename:\n" + "\n".join(sorted(unlisted))


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
