"""What a function of a module may depend on beside its arguments: the attributes that its code names.

What was found out about the function once can be trusted while these are what they were. Read from the code, and not
seen while it runs: a branch that is taken tomorrow names its attributes today. Two things escape: an attribute whose
name is made up at run time, and a global.
"""

import copy
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_ABSENT = "<absent>"
_CONSTANTS = (int, float, complex, bool, str, bytes, type(None))
_MOST_DEEP = 3


class Reads(NamedTuple):
    """Attributes with their values, as constants, functions and classes that torch.compile can read and guard.

    Attributes:
      of_owners: by the path from the module to an object, the names and values that are read there.
      absent: names that the module does not have.
    """

    of_owners: tuple[tuple[tuple[str, ...], tuple[tuple[str, Any], ...]], ...]
    absent: frozenset[str]


def _is_plain(value: Any) -> bool:
    """Whether a copy says all: constants, and what Python's containers hold of them."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return type(value) in _CONSTANTS


def _essence(value: Any) -> Any:
    """What stands for a value: of a tensor that it is one, since functions that compute with any are refused."""
    if type(value) is types.MethodType:
        return value.__func__
    if isinstance(value, nn.Module):
        return type(value)
    return Tensor if isinstance(value, Tensor) else value


def _same(value: Any, before: Any) -> bool:
    essence = _essence(value)
    if essence is before:
        return True
    return type(essence) is type(before) and _is_plain(before) and bool(essence == before)


def _python(function: Any) -> types.FunctionType | None:
    """The function itself, of a method or under decorators; None: it is none of Python's."""
    function = inspect.unwrap(function) if callable(function) else function
    function = getattr(function, "__func__", function)
    return function if isinstance(function, types.FunctionType) else None


def _names(function: types.FunctionType) -> set[str]:
    """Those in its code, strings among them for getattr."""
    pending, names = [function.__code__], set()
    while pending:
        code = pending.pop()
        names |= {*code.co_names, *(value for value in code.co_consts if isinstance(value, str))}
        pending += [value for value in code.co_consts if isinstance(value, types.CodeType)]
    return names


def _called(function: types.FunctionType, names: Iterable[str]) -> Iterator[Any]:
    """What its code may call beside attributes: functions in its globals and in its closure."""
    yield from (function.__globals__[name] for name in names if name in function.__globals__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue


def _attribute(owner: Any, name: str) -> Any:
    # Without a default: torch.compile guards one by hasattr, which evaluates a property outside the program. That of a
    # parametrized tensor then fills the cache of torch.nn.utils.parametrize, on which the program is guarded, too.
    try:
        return getattr(owner, name)
    except Exception:  # absent, or a property that raises
        return _ABSENT


def _of_torch(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] == "torch"


class _Search:
    """Functions that may run, the names in them, and the objects whose attributes these may be, until none is new."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.names = {name}
        self.owners: dict[tuple[str, ...], Any] = {(): module}
        self._functions: set[types.FunctionType] = set()
        size = -1
        while size != (size := len(self.names) + len(self.owners) + len(self._functions)):
            for path, owner in tuple(self.owners.items()):
                for attribute in tuple(self.names):
                    self._follow(path, attribute, _attribute(owner, attribute))

    def _follow(self, path: tuple[str, ...], name: str, value: Any) -> None:
        if isinstance(value, types.MethodType | types.FunctionType):
            if not _of_torch(value):  # methods of every module
                self._add(value)
        elif not isinstance(value, (Tensor, type, types.ModuleType)) and not _is_plain(value):
            self._own((*path, name), value)

    def _add(self, function: Any) -> None:
        found = _python(function)
        if found is None or found in self._functions:
            return
        self._functions.add(found)
        names = _names(found)
        self.names |= names
        for other in _called(found, names):
            if isinstance(other, types.FunctionType) and not _of_torch(other):
                self._add(other)

    def _own(self, path: tuple[str, ...], value: Any) -> None:
        if path in self.owners or len(path) > _MOST_DEEP:
            return
        self.owners[path] = value
        self._add(getattr(type(value), "forward" if isinstance(value, nn.Module) else "__call__", None))
        if isinstance(value, nn.Module):  # those in it are called by no name
            for name, part in value.named_children():
                self._own((*path, name), part)


def reads_of(module: nn.Module, name: str, others: Iterable[str] = ()) -> Reads:
    """What the module's attribute `name`, a function, may depend on.

    Args:
      module: that has it.
      name: of the function.
      others: further attributes of the module.
    """
    search = _Search(module, name)
    of_owners = []
    for path, owner in search.owners.items():
        always = others if path == () else ("forward",) if isinstance(owner, nn.Module) else ()
        names = sorted({*search.names, *always})
        values = {attribute: _essence(_attribute(owner, attribute)) for attribute in names}
        kept = tuple(
            (attribute, copy.deepcopy(value) if _is_plain(value) else value)
            for attribute, value in values.items()
            if (value is not _ABSENT or attribute in always) and value is not getattr(nn.Module, attribute, _ABSENT)
        )
        if kept:
            of_owners.append((path, kept))
    absent = {attribute for attribute in search.names if _attribute(module, attribute) is _ABSENT}
    return Reads(tuple(of_owners), frozenset(absent))


def unchanged(module: nn.Module, reads: Reads) -> bool:
    """Whether all of it is what it was; what was absent may be there under torch.compile."""
    compiling = torch.compiler.is_dynamo_compiling()  # which guards nothing where "is" says all
    for path, attributes in reads.of_owners:
        owner: Any = module
        for part in path:
            owner = getattr(owner, part, None)
        for name, value in attributes:
            now = _attribute(owner, name)
            if (compiling or now is not value) and not _same(now, value):
                return False
            if compiling and isinstance(value, types.FunctionType):
                _ = getattr(type(owner), name, None) is None  # from torch 2.15 on only this guards a method
    if compiling:
        return True
    lacks: Callable[[Any], bool] = reads.absent.isdisjoint
    return lacks(module.__dict__) and lacks(module._parameters) and lacks(module._buffers) and lacks(module._modules)
