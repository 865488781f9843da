"""What a compiled decode step and its rounds must be, or a benchmark does not count: checked where numbers are made."""

import numpy as np


def control_flow(hlo: str) -> dict[str, int]:
    """Control flow outside fusions: conditionals and loops of unknown length stop the dispatching host until the device
    has decided (unless a command buffer holds them); loops of known length only cost their launches."""
    from bench.hlo_report import computations

    entry, comps = computations(hlo)
    loops = [op for op in comps[entry] if op.opcode == "while"]
    known = sum("known_trip_count" in op.line for op in loops)
    conditionals = sum(op.opcode == "conditional" for op in comps[entry])
    return {"conditionals": conditionals, "loops": known, "loops_of_unknown_length": len(loops) - known}


def in_place(bench) -> None:
    """Raises SystemExit unless the step updates the whole state in place: donated, aliased, no pool-sized copy."""
    import jax

    from bench.hlo_report import pool_copies

    held = sum(a.nbytes for a in jax.tree.leaves(bench.state)) // bench.ranks
    aliased = bench.compiled.memory_analysis().alias_size_in_bytes
    if aliased < held:  # both of one device
        raise SystemExit(f"bench.decode: the state holds {held} bytes, the compiled step aliases only {aliased}")
    pools = jax.tree.leaves((bench.state.window, bench.state.draft_window, bench.state.global_kv, bench.state.index))
    copies = pool_copies(bench.hlo, {("u8", a.size // bench.ranks) for a in pools})
    if copies:
        raise SystemExit("bench.decode: the compiled step copies whole pools:\n" + "\n".join(copies[:8]))


def outputs(rounds: list, batch: int, gamma: int) -> None:
    """Raises SystemExit if a draft was rejected although forced, or a deciding logit was not finite."""
    for r in rounds:
        for i, out in enumerate(r.outputs):
            if not np.all(out.finite):
                raise SystemExit(f"bench.decode: step {i}: logits are not finite in rows {np.flatnonzero(~out.finite)}")
            if not np.array_equal(out.count, np.full(batch, gamma + 1)):
                raise SystemExit(f"bench.decode: step {i}: forced acceptance expected {gamma + 1} tokens, got {out.count}")
