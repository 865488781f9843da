"""How far two outputs, and the logits behind them, are apart: what bench.agreement reports."""

import numpy as np


def distances(a, b, ids, parted, other):
    """How far logits b f32[B, N, V] are from a, where a's output is ids i32[B, N].

    parted i32[B]: a position; other i32[B]: b's token there. Returns f32[B, N]: rms and max of the difference, the
    deviation of a's logits, KL(a || b); bool[B, N]: both have the same largest logit, a's is its output; f32[B]: by how
    much a prefers its own token over b's at `parted`."""
    import jax
    import jax.numpy as jnp

    d, top = b - a, jnp.argmax(a, -1)
    log_a, log_b = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
    at = jnp.take_along_axis(a, parted[:, None, None], 1)[:, 0]
    own = jnp.take_along_axis(ids, parted[:, None], 1)
    pick = lambda tokens: jnp.take_along_axis(at, tokens, 1)[:, 0]
    return {
        "rms": jnp.sqrt(jnp.mean(d * d, -1)),
        "max": jnp.abs(d).max(-1),
        "deviation": jnp.std(a, -1),
        "kl": jnp.sum(jnp.exp(log_a) * (log_a - log_b), -1),
        "same_top": top == jnp.argmax(b, -1),
        "own_top": top == ids,
        "margin": pick(own) - pick(other[:, None]),
    }


def first_divergence(a: list[int], b: list[int]) -> int | None:
    """The first position in which two outputs differ, None if they are the same."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def summary(records: list[dict]) -> dict:
    """Outputs, distances and answers of some prompts. Distances are relative to the deviation of A's logits but for KL
    (nats); margins too."""
    rows = {k: np.concatenate([r["rows"][k] for r in records]) for k in records[0]["rows"]}
    relative, parted = rows["rms"] / rows["deviation"], [r for r in records if not r["identical"]]
    scale = lambda r: float(r["rows"]["deviation"][min(r["first_divergence"], r["output_tokens"] - 1)])
    place = lambda r: r["first_divergence"]
    answers = [r["found"] for r in records if r["found"][0] is not None]
    digits = lambda x: float(f"{float(x):.4g}")
    return {
        "prompts": len(records),
        "identical": len(records) - len(parted),
        "first_divergence": sorted(r["first_divergence"] for r in parted),
        "margins_at_divergence": [digits(r["margin"] / scale(r)) for r in sorted(parted, key=place)],
        "positions": int(relative.size),
        "logits_rms": {"median": digits(np.median(relative)), "max": digits(relative.max())},
        "logits_max_abs": digits((rows["max"] / rows["deviation"]).max()),
        "kl": {"mean": digits(rows["kl"].mean()), "max": digits(rows["kl"].max())},
        "same_largest": digits(rows["same_top"].mean()),
        "a_repeats_itself": digits(rows["own_top"].mean()),
        "answers_found": {"of": len(answers), "a": sum(f[0] for f in answers), "b": sum(f[1] for f in answers)},
    }


def result(records: list[dict]) -> dict:
    tasks = list(dict.fromkeys(r["task"] for r in records))
    total = summary(records)
    return {
        "statement": f"{total['identical']} of {total['prompts']} raw outputs identical",
        "tasks": {task: summary([r for r in records if r["task"] == task]) for task in tasks},
        "total": total,
        "prompts": [{k: v for k, v in r.items() if k != "rows"} for r in records],
    }
