"""The layer schedule: what each layer writes, scores and attends, derived once, as data (spec/decode.md section 0)."""

import dataclasses


class ConfigError(ValueError):
    """A configuration that cannot work: which field, its value and the rule it breaks."""

    def __init__(self, field: str, value, rule: str):
        super().__init__(f"config: {field} = {value!r}: {rule}")
        self.field, self.value, self.rule = field, value, rule


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer's place in the schedule.

    kind: SWA, FULL2, FULL1, REINDEX or REUSE.
    ratio: tokens per compressed entry; 0 = no compressed keys.
    kv_source: layer whose compressed KV and index keys are read; None for SWA.
    index_source: layer whose top-k indices are used; None for SWA.
    publishes_candidates / restricted: the layer publishes candidate blocks / selects only inside them.
    engram: position in `engram_layer_ids`, or None.
    feature: position in `dspark_target_layer_ids` of the input of this layer, or None.
    """

    index: int
    kind: str
    ratio: int
    kv_source: int | None
    index_source: int | None
    publishes_candidates: bool = False
    restricted: bool = False
    engram: int | None = None
    feature: int | None = None

    @property
    def owns_kv(self) -> bool:
        return self.kind in ("FULL1", "FULL2")

    @property
    def scores(self) -> bool:
        return self.kind in ("FULL1", "FULL2", "REINDEX")


def derive_schedule(c) -> tuple[LayerSpec, ...]:
    """The schedule of a ModelConfig. Raises ConfigError for one that cannot work."""
    n = c.num_hidden_layers
    ratios, kv, index, cand = c.compress_ratios, c.kv_source_layer_ids, c.index_source_layer_ids, c.candidate_source_layer_id
    _check_sources(c, n)
    specs = []
    for i in range(n):
        ratio = ratios[i]
        engram = c.engram_layer_ids.index(i) if i in c.engram_layer_ids else None
        feature = c.dspark_target_layer_ids.index(i) if c.has_draft and i in c.dspark_target_layer_ids else None
        if ratio == 0:
            specs.append(LayerSpec(i, "SWA", 0, None, None, engram=engram, feature=feature))
            continue
        kv_source = max((s for s in kv if s <= i), default=None)
        index_source = max((s for s in index if s <= i), default=None)
        if kv_source is None:
            raise ConfigError("kv_source_layer_ids", kv, f"layer {i} has ratio {ratio} and no source at or before it")
        if ratios[kv_source] != ratio:
            raise ConfigError("compress_ratios", ratios,
                              f"layer {i} has ratio {ratio}, its KV source {kv_source} has {ratios[kv_source]}")  # fmt: skip
        if index_source < kv_source:
            raise ConfigError("index_source_layer_ids", index, f"layer {i} would reuse indices into another layer's KV")
        kind = f"FULL{ratio}" if i in kv else "REINDEX" if i in index else "REUSE"
        specs.append(LayerSpec(i, kind, ratio, kv_source, index_source, i == cand, kind == "REINDEX" and i > cand,
                               engram, feature))  # fmt: skip
        if specs[-1].restricted and kv_source != cand:
            raise ConfigError("candidate_source_layer_id", cand,
                              f"layer {i} is restricted to its candidates but reads layer {kv_source}'s keys")  # fmt: skip
    return tuple(specs)


def _check_sources(c, n: int) -> None:
    """Range and consistency of the id lists, before anything is derived from them."""
    want = n + c.num_nextn_predict_layers
    if len(c.compress_ratios) != want:
        raise ConfigError("compress_ratios", c.compress_ratios, f"must have {want} entries: layers, then draft stages")
    if any(r not in (0, 1, 2) for r in c.compress_ratios):
        raise ConfigError("compress_ratios", c.compress_ratios, "entries must be 0, 1 or 2")
    if any(c.compress_ratios[n:]):
        raise ConfigError("compress_ratios", c.compress_ratios, "draft stages must have ratio 0")
    for field in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids"):
        ids = getattr(c, field)
        if list(ids) != sorted(set(ids)) or any(not 0 <= i < n for i in ids):
            raise ConfigError(field, ids, f"must be ascending, distinct layers 0..{n - 1}")
    for s in c.index_source_layer_ids:
        if c.compress_ratios[s] == 0:
            raise ConfigError("index_source_layer_ids", c.index_source_layer_ids, f"layer {s} has ratio 0: nothing to index")
    missing = [s for s in c.kv_source_layer_ids if s not in c.index_source_layer_ids]
    if missing:
        raise ConfigError("kv_source_layer_ids", c.kv_source_layer_ids,
                          f"layers {missing} must be index sources too: they own the index keys")  # fmt: skip
    if c.candidate_source_layer_id not in c.kv_source_layer_ids:
        raise ConfigError("candidate_source_layer_id", c.candidate_source_layer_id, "must be one of kv_source_layer_ids")
    if c.compress_ratios[c.candidate_source_layer_id] != 1:
        raise ConfigError("candidate_source_layer_id", c.candidate_source_layer_id, "must be a layer of ratio 1")
