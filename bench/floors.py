"""Roofline floors of one MTP step, counted from the configuration (the table of spec/performance.md, for any geometry).

Each row is one operator: how often it runs, the bytes it cannot avoid (weights and records read once, activations in and
out) and its operations on the unit that can do them. A floor is the larger of the two times at ceilings measured on the
device of the run (`common.Peaks`); the step's floor is the sum, as nothing of it overlaps by more than its own operators.
"""

import dataclasses

from bench.common import Peaks
from bench.presets import Workload
from dsv41_jax.config import ModelConfig
from pallas_kernels import codecs


@dataclasses.dataclass(frozen=True)
class Row:
    """One operator. bytes and flops are of one call; unit: the tensor unit's rate; scope: the named scope it runs under."""

    op: str
    count: int
    bytes: int
    flops: int
    unit: str = "fp8"
    scope: str = ""

    def us(self, peaks: Peaks) -> float:
        return peaks.floor_us(self.bytes, self.flops, self.unit)


def _weight(out: int, inp: int) -> int:
    """Bytes of an FP8 matrix and its scales."""
    return out * inp + codecs.cdiv(out, 32) * codecs.cdiv(inp, 32)


def _linear(op, count, rows, inp, out, scope, unit="fp8") -> Row:
    """A bf16-in, bf16-out linear: FP8 weights, or bf16 ones where `unit` is bf16."""
    weight = _weight(out, inp) if unit == "fp8" else 2 * out * inp
    return Row(op, count, weight + 2 * rows * (inp + out), 2 * rows * inp * out, unit, scope)


def _expert_bytes(c: ModelConfig) -> int:
    return 3 * c.hidden_size * c.moe_intermediate_size * 17 // 32


def _experts(op, count, rows, k, touched: float, c: ModelConfig) -> Row:
    """Packed weights of the experts that some row chose, rows in, fp32 sums out."""
    h, f = c.hidden_size, c.moe_intermediate_size
    nbytes = int(touched * _expert_bytes(c)) + rows * (6 * h + 8 * k)
    return Row(op, count, nbytes, 6 * rows * k * h * f, "fp8", "experts")


def _touched(experts: int, rows: int, k: int) -> float:
    """Experts that at least one of `rows` rows is expected to choose."""
    return experts * (1 - (1 - k / experts) ** rows)


def _attention(op, count, batch, span, window, c: ModelConfig, selected: int) -> Row:
    rows, d = batch * span, c.head_dim
    q_out = 4 * rows * c.num_attention_heads * d
    ring = batch * (window + span - 1) * codecs.window_record_bytes(d)
    chosen = rows * selected * (codecs.global_record_bytes(d) + 4)
    flops = 4 * rows * c.num_attention_heads * (window + selected) * d
    return Row(op, count, q_out + ring + chosen, flops, "bf16", "sparse_attention")


def _projections(prefix, count, rows, c: ModelConfig) -> list[Row]:
    """The dense products of every attention layer, index columns of QB aside."""
    heads, groups = c.num_attention_heads * c.head_dim, c.o_groups
    z = groups * c.o_lora_rank
    # wo_a's input is read as bf16 and its rate is the fp8 unit's, the optimistic one, as in the specification's table
    wo_a = Row(f"{prefix}wo_a", count, _weight(z, heads // groups) + rows * 2 * (heads + z), 2 * rows * heads * c.o_lora_rank,
               "fp8", "output_projection")  # fmt: skip
    return [
        _linear(f"{prefix}wq_a + wkv", count, rows, c.hidden_size, c.q_lora_rank + c.head_dim, "front_projection"),
        _linear(f"{prefix}wq_b", count, rows, c.q_lora_rank, heads, "qb"),
        wo_a,
        _linear(f"{prefix}wo_b", count, rows, z, c.hidden_size, "output_projection"),
    ]


def _index_rows(w: Workload, rows: int) -> list[Row]:
    """Scores, selection, candidates and producers of the index sources."""
    c, b = w.config, w.batch
    i, j = c.index_n_heads, c.index_head_dim
    record, restricted = codecs.index_record_bytes(j), c.candidate_topk_blocks * c.candidate_block_size
    out = []
    for s in c.layers:
        if not s.scores:
            continue
        visible = w.context // s.ratio
        columns = min(visible, restricted) if s.restricted else visible
        name = "sparse score" if s.restricted else f"dense score {s.kind}"
        q = rows * i * (j // 2 + j // 32 + 2)
        out += [
            _linear("index columns of QB", 1, rows, c.q_lora_rank, i * j, "qb"),
            Row(name, 1, b * visible * record + q + 2 * rows * columns, 2 * rows * columns * i * j, "fp8", "indexer"),
            Row("select tokens", 1, rows * (2 * columns + 4 * c.index_topk), 0, "bf16", "indexer"),
        ]
        if s.publishes_candidates and w.capacity > restricted:
            ids = 4 * rows * c.candidate_topk_blocks
            out.append(Row("candidate blocks + plan", 1, 2 * rows * visible + 2 * ids, 0, "bf16", "indexer"))
        if s.owns_kv:
            wide = c.head_dim * s.ratio  # values, and gates where there are pairs
            out.append(_linear(f"producer {s.kind}", 1, rows, c.hidden_size, wide, "global_producer", "bf16"))
    merged: dict[tuple, Row] = {}
    for r in out:
        key = dataclasses.astuple(dataclasses.replace(r, count=0))
        merged[key] = dataclasses.replace(r, count=merged[key].count + 1 if key in merged else 1)
    return list(merged.values())


def _backbone(w: Workload, span: int) -> list[Row]:
    c, b, n = w.config, w.batch, w.config.num_hidden_layers
    rows, h, m = b * span, c.hidden_size, c.hc_mult
    sparse = sum(1 for s in c.layers if s.ratio)
    streams = rows * m * h * 2
    mixes = (2 * m + m * m) * m * h
    site = Row("mHC site", 2 * n, 3 * streams + 4 * mixes, 2 * rows * mixes, "bf16", "hyper")
    k, e = c.num_experts_per_tok, c.n_routed_experts
    out = _projections("", n, rows, c)
    out.append(_attention("attention, window + selected", sparse, b, span, c.sliding_window, c, c.index_topk))
    if sparse < n:
        out.append(_attention("attention, window alone", n - sparse, b, span, c.sliding_window, c, 0))
    out += _index_rows(w, rows)
    out += [
        site,
        Row("router", n, 2 * h * (rows + e), 2 * rows * h * e, "bf16", "router"),
        _experts("routed experts", n, rows, k, _touched(e, rows, k), c),
        _shared(n, rows, c),
    ]
    if c.engram_layer_ids:
        found = c.ngram_heads * c.engram_head_dim
        wide, read = (m + 1) * h, rows * found * 33 // 32  # table rows in their stored format
        nbytes = _weight(wide, found) + read + 2 * streams
        out.append(Row("engram", len(c.engram_layer_ids), nbytes, 2 * rows * found * wide, "fp8", "engram"))
    out.append(Row("lm_head", 1, 2 * c.vocab_size * h, 2 * rows * c.vocab_size * h, "bf16", "lm_head"))
    return out


def _shared(count, rows, c: ModelConfig, prefix="") -> Row:
    h, f = c.hidden_size, c.moe_intermediate_size
    return Row(f"{prefix}shared expert", count, _weight(2 * f, h) + _weight(h, f), 6 * rows * h * f, "fp8", "shared_expert")


def _draft(w: Workload, span: int) -> list[Row]:
    c, b = w.config, w.batch
    n, block, h = c.num_nextn_predict_layers, c.dspark_block_size, c.hidden_size
    v, r = c.vocab_size, c.dspark_markov_rank
    rows, k, e = b * block, c.dspark_num_experts_per_tok, c.dspark_n_routed_experts
    m = c.hc_mult
    site = Row("draft mHC site", 2 * n, 3 * rows * m * h * 2 + 4 * (2 * m + m * m) * m * h,
               2 * rows * (2 * m + m * m) * m * h, "bf16", "hyper")  # fmt: skip
    kv = Row("draft commit", n, _weight(c.head_dim, h) + 2 * b * span * h, 2 * b * span * h * c.head_dim, "fp8", "draft_commit")
    return [
        *_projections("draft ", n, rows, c),
        _attention("draft attention", n, b, block, c.sliding_window + block, c, 0),
        site,
        _experts("draft experts", n, rows, k, _touched(e, rows, k), c),
        _shared(n, rows, c, "draft "),
        Row("draft lm_head", 1, 2 * v * h, 2 * rows * v * h, "bf16", "lm_head"),
        Row("Markov head", block, 2 * v * r, 2 * b * v * r, "bf16", "markov"),
        _linear("main_proj", 1, b * span, len(c.dspark_target_layer_ids) * h, h, "draft_commit"),
        kv,
    ]


def step_rows(w: Workload, gamma: int) -> list[Row]:
    """Every operator of one decode step of `w.batch` requests with `gamma` drafts each (0 = plain decoding, no drafter)."""
    span = gamma + 1
    return _backbone(w, span) + (_draft(w, span) if gamma else [])


def step_floor(w: Workload, gamma: int, peaks: Peaks) -> dict:
    """{"ms", "gbytes", "gflop", "rows": [{op, count, mbytes, gflop, us}]}: the floor of one step and what it is made of."""
    rows = step_rows(w, gamma)
    return {
        "ms": round(sum(r.count * r.us(peaks) for r in rows) / 1e3, 4),
        "gbytes": round(sum(r.count * r.bytes for r in rows) / 1e9, 3),
        "gflop": round(sum(r.count * r.flops for r in rows) / 1e9, 1),
        "rows": [
            {"op": r.op, "count": r.count, "mbytes": round(r.bytes / 1e6, 3), "gflop": round(r.flops / 1e9, 3),
             "us": round(r.us(peaks), 2)}
            for r in rows
        ],
    }  # fmt: skip
