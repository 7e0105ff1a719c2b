"""Rules about what attention sees and which units live."""

from __future__ import annotations

from analyzer.diagnoses.declaration import Diagnosis

ATTENTION_AND_UNITS = (
    Diagnosis(
        name="causal_mask_absent",
        title="Broken causal mask",
        question="Does attention see the future although the run declares a causal mask?",
        meaning="A query attends to later keys, so the model can copy the token that it is asked to predict.",
        remedy="Mask the scores with -inf before the softmax: allow key j for query i only if j <= i.",
        source="exact invariant: masked probabilities are exactly 0.0, and so is their sum",
        evidence="proof",
        severity="S3",
        explains=(
            "label_noise",
            "underfitting",
            "loss_below_entropy_floor",
            "overfitting",
            "attention_entropy_collapse",
            "bad_batch",
            "loss_spike",
            "exploding_gradients",
            "gradient_norm_spike",
        ),
        requires=("manifest.mask_type", "attention.future_mass"),
        panel=4,
    ),
    Diagnosis(
        name="causal_mask_off_by_one",
        title="Causal mask off by one",
        question="Does attention see exactly one key too many, the next token?",
        meaning=(
            "Each query sees the token that it must predict, and nothing after it: the diagonal is shifted."
        ),
        remedy=(
            "Build the mask with tril(k=0), not k=1, and check how the targets are shifted against the "
            "inputs."
        ),
        source="exact invariant: mass on the next key, and exactly 0.0 on every later one",
        evidence="proof",
        severity="S3",
        explains=(
            "label_noise",
            "underfitting",
            "loss_below_entropy_floor",
            "overfitting",
            "attention_entropy_collapse",
            "bad_batch",
            "loss_spike",
            "exploding_gradients",
            "gradient_norm_spike",
        ),
        requires=("manifest.mask_type", "attention.future_mass", "attention.future_mass_beyond_next"),
        panel=4,
    ),
    Diagnosis(
        name="attention_entropy_collapse",
        title="Attention entropy collapse",
        question="Do half of the attention heads look at one key each, with extreme logits?",
        meaning="The softmax is saturated: attention is frozen, and its gradient vanishes or jumps.",
        remedy="Normalise queries and keys, lower the learning rate, or restart from before the logits grew.",
        source="entropy below 0.2 in half of the heads with logits above 30",
        evidence="signature",
        severity="S2",
        explains=(
            "underfitting",
            "bad_batch",
            "loss_spike",
            "gradient_norm_spike",
        ),
        requires=(
            "attention.entropy",
            "attention.max_abs_logit",
        ),
        panel=4,
    ),
    Diagnosis(
        name="dead_units",
        title="Dead units",
        question="Are many units of a layer silent on every token of a window of at least an epoch?",
        meaning="A unit below zero for every input gets no gradient and cannot come back.",
        remedy="Lower the learning rate or the bias, or use an activation that leaks (GELU, leaky ReLU).",
        source="units that are zero on all tokens of a window",
        evidence="signature",
        severity="S2",
        explains=(
            "detached_branch",
            "underfitting",
            "loss_spike",
            "gradient_norm_spike",
        ),
        requires=(
            "units.unit_count",
            "units.dead_unit_count",
            "units.window_steps",
            "units.token_count",
        ),
        panel=6,
    ),
)
