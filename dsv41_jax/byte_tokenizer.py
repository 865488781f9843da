"""A small byte-level tokenizer for random checkpoints: 256 bytes, a few English pieces, the special tokens of a config."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dsv41_jax.config import ModelConfig
from dsv41_jax.tokenizer import reserved_ids

# merged pieces, most frequent first, each the join of two earlier ones; _ is a space, / a line break
_PIECES = """
_t he _a in _w _the _s re _o er _b at it _c ou _p nd _l _f or on en _, ed _m es _. _in _n ing is _d al _to _th ow as _r
_e _and _h ut le ion _of om ld se ot id _re an ar _on ll _u _g _it ould ic ig ay _k am _be _is ce ct _was _we _not ad
_by _T _st ent ith _that igh _with _there ore iv od ight _he _se _for _sh _wh _or _com _S _v _L _W ke im lo st ac op _F
_I _ex un _would ork et _sc ver _at _one itt ind ex ly um _The _x _whe os _H _per ep ve _i ts ions _C ag _R _all _up ib
hing _ab qu _D her _but all ame _go _Y _wind _out _ind _what and _an ake ch _they tr ate ning _You ken _P _de il now _pr
ir ft _could _know _were ab _B ouse _house ittle ul out el _con pl ap put _M ound ck _this ill nce orm _A _K _pos _do
_as pt est _are _then _ne per ol ation _N _no _us _id _E _ch _G _gr ive _y our _fu gin if ibut tribut use res _sm _who
ast _only _In ink _lo act _end _comp _j _tim _su _li _low _me ave _fr ds ity _when _window _pe _int // __ _you _say
"""


def special_tokens(c: ModelConfig) -> dict[int, str]:
    """{id: token} of the ids that the config gives a meaning."""
    out = {c.bos_token_id: "<|bos|>", c.eos_token_id: "<|eos|>", c.pad_token_id: "<|pad|>"}
    if c.has_draft:
        out[c.dspark_noise_token_id] = "<|noise|>"
    return out | {i: f"<|image_{n}|>" for n, i in enumerate(reserved_ids(c))}


def fits(c: ModelConfig) -> bool:
    """Whether the vocabulary has room for the bytes and the special tokens."""
    return c.vocab_size >= 256 + len(special_tokens(c))


def byte_tokenizer(c: ModelConfig) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of at most `vocab_size` ids: any text encodes, and decodes to itself.

    The special tokens sit at their ids; the bytes, then as many pieces as fit, take the free ids in order.
    Raises ValueError if the bytes do not fit.
    """
    special = special_tokens(c)
    if not fits(c):
        raise ValueError(f"vocab_size: expected >= {256 + len(special)} for a byte-level tokenizer, got {c.vocab_size}")
    free = (i for i in range(c.vocab_size) if i not in special)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: next(free) for symbol in alphabet}
    merges = []
    for piece in _PIECES.split():
        symbol = piece.replace("_", "Ġ").replace("/", "Ċ")
        cut = next(i for i in range(1, len(symbol)) if symbol[:i] in vocab and symbol[i:] in vocab)
        number = next(free, None)
        if number is None:
            break
        vocab[symbol] = number
        merges.append((symbol[:cut], symbol[cut:]))
    vocab |= {token: i for i, token in special.items()}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([special[i] for i in sorted(special)])
    return raw
