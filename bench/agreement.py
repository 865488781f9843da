"""Do two ways of decoding give the same outputs? Two option sets over one set of prompts.

    python -m bench.agreement                                        # a tiny random checkpoint, on the spot
    python -m bench.agreement --checkpoint DIR --prompts FILE.jsonl --a reference --b auto
    python -m bench.agreement --preset flash-rank --layers 6 --out bench/results/agreement_flash_rank_6.json

A side is what `bench.decode --impl` takes (auto, reference, operator=name, ...), and gamma=N, draft=off, chunk=N (prompt
tokens of its prefill steps) and precision=NAME beside it: `--a reference,draft=off --b auto,gamma=3`. Every prompt is
continued greedily by both. Then both run teacher-forced along A's output, in steps of as many rows as they decode with, and
their logits are compared position by position; where outputs part, that says whether a rounding did it (a margin of the size
of the distance) or not. How far rounding alone drives two sides apart says a pair that differs in nothing but the sizes of
its steps, for which XLA sums in another order: `--a reference --b reference,gamma=3,chunk=128`.

Prompts: a JSONL file as `dsv41 generate` takes it, with an optional "task" and "answer" per line, or synthetic retrieval
prompts (`bench.retrieval`). Random weights answer nothing: their outputs only show whether both sides compute the same.
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import tempfile
import time

import numpy as np

from bench import decode
from bench.command_line import out_file, run_program
from bench.distances import distances, first_divergence, result
from dsv41_jax.arguments import at_least

TINY_RUN = {"count": 8, "context": 384, "max_new_tokens": 16, "batch": 4, "chunk": 64, "capacity": 512}
FULL_RUN = {"count": 16, "context": 3072, "max_new_tokens": 32, "batch": 8, "chunk": 256, "capacity": 20480}


@dataclasses.dataclass(frozen=True)
class Side:
    """One way of decoding: its options, drafts per step and precision; text: as it was asked for; chunk: prompt tokens of a
    prefill step, None for the run's."""

    text: str
    options: object
    gamma: int
    precision: str
    chunk: int | None = None


def parse_side(text: str, config) -> Side:
    """Raises ValueError for an unknown word, operator, precision or number of drafts."""
    from dsv41_jax.precision import precision
    from pallas_kernels.registry import CPU, current_arch

    most = config.dspark_block_size if config.has_draft else 0
    values, rest = {}, []
    for part in (p.strip() for p in text.split(",") if p.strip()):
        key, _, value = part.partition("=")
        if key in ("gamma", "draft", "precision", "chunk"):
            values[key] = value
        elif value or key in ("auto", "reference"):
            rest.append(part)
        else:
            known = "auto, reference, operator=name, gamma=N, draft=on|off, chunk=N or precision=NAME"
            raise ValueError(f"{text}: expected {known}, got {part!r}")
    if values.get("draft", "on") not in ("on", "off"):
        raise ValueError(f"{text}: draft expected on or off, got {values['draft']!r}")
    gamma = values.get("gamma", "0" if values.get("draft") == "off" else str(most))
    if not gamma.isdigit() or int(gamma) > most:
        raise ValueError(f"{text}: gamma expected 0..{most}, got {gamma!r}")
    if values.get("draft") == "off" and int(gamma):
        raise ValueError(f"{text}: gamma={gamma} asks for drafts, draft=off for none")
    chunk = values.get("chunk")
    if chunk is not None and not (chunk.isdigit() and int(chunk)):
        raise ValueError(f"{text}: chunk expected a whole number of at least 1, got {chunk!r}")
    options = decode.decode_options(argparse.Namespace(impl=",".join(rest) or "auto", fake_balance=False))
    if current_arch() == CPU and options.default_implementation == "auto":
        # all that a CPU has: by its own name both sides share their executables
        options = dataclasses.replace(options, default_implementation="reference")
    return Side(text, options, int(gamma), precision(values.get("precision", "released")).name, chunk and int(chunk))


class Runner:
    """Decodes groups of `batch` prompts one side's way; every group gives its steps the same shapes.

    capacity: tokens of a page table; new: ids of an output; chunk: prompt tokens of a prefill step, where the side names none."""

    def __init__(self, side: Side, config, params, batch: int, capacity: int, new: int, chunk: int):
        import jax.numpy as jnp

        from dsv41_jax.cache import CacheGeometry, PageTables
        from dsv41_jax.model import Network
        from dsv41_jax.precision import precision
        from dsv41_jax.sampling import SamplingParams, pack_sampling
        from dsv41_jax.step import Steps

        chunk = side.chunk or chunk
        self.side, self.batch, self.new, self.chunk = side, batch, new, chunk
        span = max(chunk, config.dspark_block_size + 1)
        columns = -(-capacity // 128)
        geometry = CacheGeometry(batch, 1 + batch * columns, page_tokens=128, span=span)
        self.net = Network(config, geometry, precision(side.precision), side.options)
        self.steps = Steps(self.net, params, side.gamma)
        table = jnp.arange(1, 1 + batch * columns, dtype=jnp.int32).reshape(batch, columns)
        self.tables = PageTables.shared(table, config)
        self.sampling = pack_sampling([SamplingParams(ignore_eos=True)] * batch, [0] * batch, config.eos_token_id)

    def prefill(self, prompts: list[list[int]]):
        """The state before the last token of each prompt, which becomes the anchor of the first step."""
        import jax.numpy as jnp

        from dsv41_jax.cache import init_state
        from dsv41_jax.step import PrefillBatch

        net = self.net
        state = init_state(net.config, net.geometry, net.precision)
        anchors = jnp.asarray([p[-1] for p in prompts] + [0] * (self.batch - len(prompts)), jnp.int32)
        never = jnp.zeros(self.batch, bool)
        for start in range(0, max(len(p) for p in prompts) - 1, self.chunk):
            chunk = self._chunk([p[:-1] for p in prompts], start, self.chunk, [0] * len(prompts))
            state, _ = self.steps.prefill(state, PrefillBatch(chunk, self.sampling, never, anchors))
        return state

    def _chunk(self, rows: list[list[int]], offset: int, width: int, first: list[int]):
        """Rows `offset .. offset + width` of every list, whose first row has position `first`; [] = padding."""
        import jax.numpy as jnp

        from dsv41_jax.plan import Chunk

        tokens = np.zeros((self.batch, width), np.int32)
        count, start = np.zeros((2, self.batch), np.int32)
        for i, row in enumerate(rows):
            piece = row[offset : offset + width]
            tokens[i, : len(piece)], count[i], start[i] = piece, len(piece), first[i] + offset
        slots = np.where(count > 0, np.arange(self.batch), -1).astype(np.int32)
        return Chunk(*map(jnp.asarray, (tokens, start, count, slots)), self.tables)

    def outputs(self, state, size: int) -> tuple[list[list[int]], int, int]:
        """(`new` greedy ids per request, drafts verified, drafts accepted), decoded from a state, which is donated."""
        import jax.numpy as jnp

        from dsv41_jax.step import DecodeBatch

        out, drafted, accepted = [[] for _ in range(size)], 0, 0
        while live := [i for i in range(size) if len(out[i]) < self.new]:
            slots = np.full(self.batch, -1, np.int32)
            slots[live] = live
            state, step = self.steps.decode(state, DecodeBatch(jnp.asarray(slots), self.tables, self.sampling))
            tokens, counts, finite = (np.asarray(x) for x in (step.tokens, step.count, step.finite))
            if not finite.all():
                rows = np.flatnonzero(~finite)
                raise SystemExit(f"bench.agreement: {self.side.text}: logits are not finite in rows {rows}")
            for i in live:
                out[i] += tokens[i, : counts[i]].tolist()
            drafted += self.side.gamma * len(live)
            accepted += int(np.asarray(step.accepted)[live].sum())
        return [ids[: self.new] for ids in out], drafted, accepted

    def forced(self, state, prompts: list[list[int]], outputs: list[list[int]]):
        """f32[B, new, V] on the device: the logits that decide each token of `outputs`, from a state, which is donated."""
        import jax.numpy as jnp

        width = self.side.gamma + 1
        rows = [[p[-1], *o[:-1]] for p, o in zip(prompts, outputs, strict=True)]
        pieces = []
        for offset in range(0, self.new, width):
            chunk = self._chunk(rows, offset, width, [len(p) - 1 for p in prompts])
            state, logits, _ = self.steps.forward(state, chunk)
            pieces.append(logits)
        return jnp.concatenate(pieces, 1)[:, : self.new]


def run_group(sides: list[Runner], group, measure, eos: int | None) -> tuple[list[dict], list[tuple[int, int]]]:
    """One record per prompt of the group, and (drafted, accepted) per side."""
    import jax
    import jax.numpy as jnp

    prompts, batch = [p.ids for p in group], sides[0].batch
    # one side after the other: XLA times library kernels while it compiles, and must not do so beside what another side runs
    states = [s.prefill(prompts) for s in sides]
    made = [s.outputs(jax.tree.map(jnp.copy, state), len(group)) for s, state in zip(sides, states, strict=True)]
    (a, *_), (b, *_) = made
    logits = [s.forced(state, prompts, a) for s, state in zip(sides, states, strict=True)]
    pad = [0] * (batch - len(group))
    parted = [first_divergence(x, y) or 0 for x, y in zip(a, b, strict=True)]
    other = [y[i] for y, i in zip(b, parted, strict=True)]
    full = lambda rows: jnp.asarray([*rows, *pad], jnp.int32)
    ids = jnp.asarray([*a, *[[0] * sides[0].new for _ in pad]], jnp.int32)
    found = {k: np.asarray(v) for k, v in measure(*logits, ids, full(parted), full(other)).items()}
    cut = lambda ids: ids[: ids.index(eos) + 1] if eos in ids else ids
    records = []
    for i, prompt in enumerate(group):
        x, y = cut(a[i]), cut(b[i])
        at, upto = first_divergence(x, y), len(x)  # what follows an end of text is nobody's output
        rows = {k: found[k][i, :upto] for k in ("rms", "max", "deviation", "kl", "same_top", "own_top")}
        records.append({
            "task": prompt.task, "prompt_tokens": len(prompt.ids), "output_tokens": upto, "identical": at is None,
            "first_divergence": at, "margin": None if at is None else float(found["margin"][i]), "rows": rows,
            "found": [None if prompt.found is None else prompt.found(ids) for ids in (x, y)],
        })  # fmt: skip
    return records, [(d, acc) for _, d, acc in made]


# what is compared -----------------------------------------------------------------------------------------------------


def network(args, stack: contextlib.ExitStack):
    """(config, load(sides) -> parameters, tokenizer or None, notes)."""
    from dsv41_jax import checkpoint
    from dsv41_jax.config import ModelConfig
    from dsv41_jax.tokenizer import Tokenizer

    if args.preset:
        from bench import presets, synthetic

        w = presets.workload(args.preset, layers=args.layers)
        shuffled = lambda sides: any(decode.takes_shuffled_experts(s.options) for s in sides)
        make = lambda sides: synthetic.random_parameters(w.config, args.seed, shuffled(sides))
        notes = [n for n in w.notes if "acceptance" not in n and "by force" not in n]
        return w.config, make, None, [*notes, "random weights: outputs answer nothing"]
    folder, notes = args.checkpoint, []
    if folder and args.layers:
        raise ValueError("--layers: expected random weights, a checkpoint has its own layers")
    if folder is None:
        from bench.presets import workload
        from dsv41_jax.make_checkpoint import make_checkpoint

        w = workload("tiny", layers=args.layers or 3)
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="dsv41-agreement-"))
        folder = make_checkpoint(w.config, pathlib.Path(place) / "tiny", seed=args.seed)
        notes = ["a tiny checkpoint with random weights: outputs answer nothing", *w.notes[1:]]
    config = ModelConfig.from_file(folder)
    tokenizer = Tokenizer.from_folder(folder) if (pathlib.Path(folder) / "tokenizer.json").is_file() else None
    return config, lambda sides: checkpoint.load(folder, config, progress=False), tokenizer, notes


def explained(side: Side, params, config, batch: int, context: int) -> dict[str, str] | None:
    """{operator: implementation} of the side's decode step; None outside precision `released`."""
    from dsv41_jax.explain import explain_operators

    if side.precision != "released":
        return None
    found = explain_operators(config, side.options, batch=batch, context=context)
    if side.options.impl("experts") == "auto":
        found["experts"] = decode.explain_experts(params.layers[0].ffn.experts, config, batch * (side.gamma + 1))
    return {op: why["chosen"] for op, why in found.items()}


def parse(argv) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench.agreement", description=__doc__.split("\n\n")[0])
    which = p.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", metavar="DIR", help="default: a tiny random one, made on the spot")
    which.add_argument("--preset", help="random weights made on the device: tiny or flash-rank")
    p.add_argument("--layers", type=at_least(3), help="cut random weights to this many layers (default 3 of the tiny checkpoint; 6 keep every class)")
    p.add_argument("--a", default="reference", metavar="SIDE", help="default: reference")
    p.add_argument("--b", default="auto", metavar="SIDE", help="default: auto")
    p.add_argument("--prompts", metavar="FILE.jsonl", help="default: synthetic retrieval prompts")
    p.add_argument("--tasks", help="comma-separated kinds of synthetic prompts (default: all)")
    for name, about in (("count", "synthetic prompts"), ("context", "tokens of a synthetic prompt, at most"),
                        ("max-new-tokens", "tokens of an output"), ("batch", "prompts decoded together"),
                        ("chunk", "prompt tokens per prefill step"),
                        ("capacity", "tokens of a page table; more than the candidate blocks cover makes layers use them")):  # fmt: skip
        key = name.replace("-", "_")
        p.add_argument(f"--{name}", type=int, help=f"{about} (default {FULL_RUN[key]}; tiny: {TINY_RUN[key]})")
    p.add_argument("--ignore-eos", action="store_true", help="compare what follows an end of text too")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=out_file, metavar="FILE", help="write the result as JSON")
    args = p.parse_args(argv)
    small = args.preset == "tiny" or (args.preset is None and args.checkpoint is None)
    for key, value in (TINY_RUN if small else FULL_RUN).items():
        setattr(args, key, value if getattr(args, key) is None else getattr(args, key))
        if getattr(args, key) < 1:
            p.error(f"--{key}: expected >= 1, got {getattr(args, key)}")
    return args


def main(argv=None) -> dict:
    args = parse(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.97")
    import jax

    from bench import common, retrieval

    if jax.default_backend() == "cpu":  # LLVM's passes cost a CPU more than they save here; both sides go without
        jax.config.update("jax_disable_most_optimizations", True)
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        config, load, tokenizer, notes = network(args, stack)
        sides = [parse_side(text, config) for text in (args.a, args.b)]
        if args.prompts:
            prompts, source = retrieval.from_file(args.prompts, args.checkpoint, tokenizer), pathlib.Path(args.prompts).name
        else:
            encoder = retrieval.Text(tokenizer) if tokenizer else retrieval.WordIds(config)
            kinds = tuple(k.strip() for k in args.tasks.split(",")) if args.tasks else retrieval.KINDS
            prompts = retrieval.prompts(encoder, args.count, args.context, args.seed, kinds)
            source = f"synthetic retrieval, seed {args.seed}, " + ("tokenizer" if tokenizer else "hashed words")
        retrieval.check_prompts(prompts, config, args.max_new_tokens)
        params = jax.block_until_ready(load(sides))
    if dataclasses.replace(sides[0], text="") == dataclasses.replace(sides[1], text=""):
        notes.append("both sides are the same program on this device")
    print(f"{len(prompts)} prompts and weights after {time.perf_counter() - start:.1f} s", flush=True)
    context = max(len(p.ids) for p in prompts)
    capacity = max(args.capacity, context + args.max_new_tokens + config.dspark_block_size + 1)  # drafts reach beyond the end
    runners = [Runner(s, config, params, args.batch, capacity, args.max_new_tokens, args.chunk) for s in sides]
    measure, records, drafts = jax.jit(distances), [], np.zeros((2, 2), int)
    for first in range(0, len(prompts), args.batch):
        group = prompts[first : first + args.batch]
        made, counts = run_group(runners, group, measure, None if args.ignore_eos else config.eos_token_id)
        records += made
        drafts += np.array(counts)
        same = sum(r["identical"] for r in records)
        print(f"{len(records)} of {len(prompts)} prompts, {same} identical, {time.perf_counter() - start:.1f} s", flush=True)
    out = {
        "benchmark": "agreement",
        "environment": common.environment(args.seed),
        "protocol": {
            "weights": args.preset or ("checkpoint" if args.checkpoint else "tiny"),
            "layers": [s.kind for s in config.layers],
            "prompts": source,
            "prompt_tokens": [min(len(p.ids) for p in prompts), context],
            "capacity": capacity,
            "max_new_tokens": args.max_new_tokens,
            "batch": args.batch,
            **{
                name: {"asked": s.text, "gamma": s.gamma, "precision": s.precision,
                       "prefill_chunk": s.chunk or args.chunk,
                       "implementations": explained(s, params, config, args.batch, capacity),
                       "drafted": int(drafted), "accepted": int(accepted)}
                for name, s, (drafted, accepted) in zip("ab", sides, drafts, strict=True)
            },
            "notes": notes,
        },
        "result": result(records),
        "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip
    if args.out:
        common.write_json(args.out, out)
    _print(out)
    return out


def _print(out: dict) -> None:
    r, p = out["result"], out["protocol"]
    for note in p["notes"]:
        print(f"note: {note}")
    print(f"A {p['a']['asked']}, B {p['b']['asked']}; logits along A's output, relative to their deviation")
    print(f"{'task':14s} {'identical':>10s} {'rms median':>11s} {'rms max':>9s} {'KL max':>9s} {'same top':>9s} "
          f"{'answers A, B':>13s}  parted at (margin)")  # fmt: skip
    for task, s in [*r["tasks"].items(), ("total", r["total"])]:
        parted = [f"{i} ({m:.2g})" for i, m in zip(s["first_divergence"], s["margins_at_divergence"], strict=True)]
        found = s["answers_found"]
        print(f"{task:14s} {s['identical']:5d} / {s['prompts']:2d} {s['logits_rms']['median']:11.2e} {s['logits_rms']['max']:9.2e} "
              f"{s['kl']['max']:9.2e} {s['same_largest']:9.3f} {found['a']:4d}, {found['b']} / {found['of']:2d}   "
              f"{', '.join(parted[:6])}{' ...' if len(parted) > 6 else ''}")  # fmt: skip
    print(f"{r['statement']} in {out['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    run_program("bench.agreement", main)
