"""How an operator's `api` picks one of its implementations, and says why.

An operator lists its implementations fastest first, each with the architectures it is for and a check of the shapes it
takes; `reference` is always last and takes everything. `resolve` returns the first that fits and the reasons against
those before it, so a fallback can be asked for (`explain`) and never has to be guessed.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax

CPU = "cpu"
_TARGET: contextvars.ContextVar[str | None] = contextvars.ContextVar("target architecture", default=None)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an operator.

    name: what `impl=` and DecodeOptions call it.
    run: the function, with the operator's own signature.
    arches: architectures it is for ("sm_90", "sm_100", "sm_103", "cpu"); empty means any.
    refuses: called with the operator's arguments; returns why these shapes are not taken, or None.
    by_name_only: why "auto" passes it over although it would fit; empty where it may be picked.
    reads_packed: whether it multiplies MXFP4 operands in their packed form; any other decodes them first.
    """

    name: str
    run: Callable
    arches: tuple[str, ...] = ()
    refuses: Callable[..., str | None] = lambda *a, **k: None
    by_name_only: str = ""
    reads_packed: bool = False


@contextlib.contextmanager
def compiling_for(arch: str) -> Iterator[None]:
    """What is traced inside is meant for `arch` ("sm_103", ...), whatever the default device is."""
    token = _TARGET.set(arch)
    try:
        yield
    finally:
        _TARGET.reset(token)


def current_arch() -> str:
    """"sm_90", "sm_100", "sm_103", ... that is compiled for (`compiling_for`, else the default device), or "cpu"."""
    if target := _TARGET.get():
        return target
    if jax.default_backend() != "gpu":
        return CPU
    return "sm_" + str(jax.devices()[0].compute_capability).replace(".", "")


def current_capability() -> int | None:
    """90, 100, 103, ... of `current_arch`, None for a CPU."""
    arch = current_arch()
    return None if arch == CPU else int(arch.removeprefix("sm_").rstrip("a"))


def arch_of(capability: int | None) -> str:
    """"sm_90", "sm_100", ... of a compute capability times ten; "cpu" of None."""
    return CPU if capability is None else f"sm_{capability}"


def resolve(
    op: str, implementations: Sequence[Implementation], impl: str, arch: str | None, *args, **kwargs
) -> tuple[Implementation, dict[str, str]]:
    """Pick an implementation.

    impl: "auto" or a name; a named one is used whatever the architecture (interpreted tests, deviceless compiles), but
        not for shapes that it refuses.
    arch: architecture compiled for; None asks the default device.
    Returns the implementation and {name: reason} for each one passed over.
    Raises ValueError if `impl` is unknown or refuses the arguments.
    """
    names = [i.name for i in implementations]
    if impl != "auto":
        if impl not in names:
            raise ValueError(f"{op}: impl expected one of {['auto', *names]}, got {impl!r}")
        chosen = implementations[names.index(impl)]
        reason = chosen.refuses(*args, **kwargs)
        if reason:
            raise ValueError(f"{op}: {impl} does not take these arguments: {reason}")
        return chosen, {}
    arch = arch or current_arch()
    against = {}
    for candidate in implementations:
        if candidate.arches and arch not in candidate.arches:
            against[candidate.name] = f"is for {', '.join(candidate.arches)}, this is {arch}"
        elif reason := candidate.refuses(*args, **kwargs):
            against[candidate.name] = reason
        elif candidate.by_name_only:
            against[candidate.name] = f"by name only: {candidate.by_name_only}"
        else:
            return candidate, against
    raise ValueError(f"{op}: no implementation takes these arguments: {against}")
