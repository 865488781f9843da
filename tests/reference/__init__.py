"""A slow, plain numpy model of DeepSeek-V4.1-Flash's text network and its DSpark drafter (spec/model.md).

Written from the specification alone, one token at a time with explicit caches, so that the JAX model has something
independent to agree with: nothing here imports JAX or any of the project's packages.

=================== ====================================================================================
`codecs`            FP8 / FP4 formats and the bf16 rounding
`weights`           safetensors reader, dequantised weights
`ops`               config, RMSNorm, RoPE, mHC, routing, engram hashes, selection: functions of arrays
`model`             caches and the backbone: `Model.step` runs one token
`dspark`            the drafter and greedy decoding with and without it
`geometries`        small configs of shapes that the golden data lacks
`random_weights`    random checkpoints for any config, under the released names and dtypes
`record`            a whole teacher-forced pass as arrays under the golden data's names
=================== ====================================================================================
"""
