"""Loops over state in 8 bits that are made of whole vectors, and do not decode it into a copy first."""

import re

import pytest

import arrayopt as ao

LOOP = re.compile(r"^static __forceinline__ void pass_\w+\(.*?^\}", re.MULTILINE | re.DOTALL)
RULES = {
    "AdamW": ao.AdamW(state_dtype="int8"),
    "LAMB": ao.LAMB(state_dtype="int8"),
    "LANS": ao.LANS(state_dtype="int8"),
    "cautious AdamW": ao.AdamW(state_dtype="int8", caution=True),
    "cautious LAMB": ao.LAMB(state_dtype="int8", caution=True),
    "Adan": ao.Adan(state_dtype="int8"),
    "lookahead": ao.LAMB(state_dtype="int8", lookahead_steps=5),
}


@pytest.mark.parametrize(
    ("rule", "dtype", "options"),
    [(rule, "float32", {}) for rule in RULES]
    + [("LAMB", dtype, {"master_weights": masters}) for dtype in ("bfloat16", "float16") for masters in (True, "split")]
    + [("AdamW", dtype, {"rounding": "stochastic"}) for dtype in ("bfloat16", "float16")],
)
def test_loops_over_codes_take_whole_vectors(rule, dtype, options):
    text = ao.source(type(RULES[rule])(**vars(RULES[rule]) | options), engine="cpp", dtype=dtype)
    coded = [loop for loop in LOOP.findall(text) if "codes_m" in loop]
    assert coded
    assert all("vector_at(" in loop for loop in coded)
