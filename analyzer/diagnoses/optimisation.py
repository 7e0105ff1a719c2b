"""Rules about initialisation, learning rate and weight decay."""

from __future__ import annotations

from analyzer.diagnoses.declaration import Diagnosis

OPTIMISATION = (
    Diagnosis(
        name="initialisation_too_large",
        title="Initialisation too large",
        question="Do the weights start so large that the first loss or activations leave the useful range?",
        meaning=(
            "Softmax and units are saturated before anything is learned, and an update hardly moves such "
            "weights."
        ),
        remedy="Use Xavier or He initialisation, and scale down what each residual branch adds.",
        source="first loss above 1.5 ln V, or a median gain of the matrices above 2",
        evidence="signature",
        severity="S2",
        explains=(
            "exploding_gradients",
            "vanishing_gradients",
            "attention_entropy_collapse",
            "dead_units",
            "learning_rate_too_low",
            "learning_rate_too_high",
            "underfitting",
            "weight_decay_too_strong",
            "bad_batch",
            "loss_spike",
            "gradient_norm_spike",
        ),
        requires=(
            "manifest.uniform",
            "steps.train_loss",
            "weight.l2_norm",
            "tensor_names.shape",
            "tensor_names.role",
        ),
        panel=1,
    ),
    Diagnosis(
        name="initialisation_too_small",
        title="Initialisation too small",
        question="Do the weights start so small that attention cannot tell one key from another?",
        meaning=(
            "Scores near zero make attention uniform; gradients through the product of two small matrices "
            "are tiny."
        ),
        remedy="Scale the weights to a gain near 1 (Xavier, He).",
        source="entropy of every head above 0.99 with logits below 0.1 at step 0",
        evidence="signature",
        severity="S2",
        explains=(
            "dead_units",
            "underfitting",
            "bad_batch",
            "loss_spike",
            "gradient_norm_spike",
        ),
        requires=(
            "attention.entropy",
            "attention.max_abs_logit",
        ),
        panel=5,
    ),
    Diagnosis(
        name="zero_initialisation",
        title="Zero initialisation",
        question="Do weight matrices start at exactly zero and get no gradient that could move them?",
        meaning="Two zero matrices in a row pass neither value nor gradient, so that this part never learns.",
        remedy="Initialise at random; of two matrices in a row at most one may be zero.",
        source="exact zeros of weights at step 0, and of their gradients from there on",
        evidence="proof",
        severity="S2",
        explains=(
            "detached_branch",
            "dead_units",
            "vanishing_gradients",
            "initialisation_too_small",
            "learning_rate_too_low",
            "underfitting",
        ),
        requires=(
            "weight.l2_norm",
            "gradient.l2_norm",
            "tensor_names.name",
            "tensor_names.shape",
        ),
        panel=5,
    ),
    Diagnosis(
        name="warmup_missing",
        title="Missing warmup",
        question="Does training start at a high learning rate although the plan declares a ramp?",
        meaning="Adam's first updates have full size while its moments are still guesses from one batch.",
        remedy="Wire the declared ramp into the schedule, and call the schedule from step 0 on.",
        source="first applied rate above 0.2 of the planned peak where the plan starts below it",
        evidence="proof",
        severity="S1",
        explains=(
            "underfitting",
            "schedule_not_followed",
            "learning_rate_too_high",
            "loss_spike",
            "gradient_norm_spike",
        ),
        requires=("steps.learning_rate", "steps.planned_learning_rate"),
        panel=2,
    ),
    Diagnosis(
        name="schedule_not_followed",
        title="Schedule not followed",
        question="Is the learning rate that was applied another one than the declared schedule asks for?",
        meaning="The scheduler is not wired, counts other steps, or was made for another horizon.",
        remedy=(
            "Step the scheduler once per update with the declared horizon; log the rate that the update uses."
        ),
        source="applied against planned rate, row by row, to float round-off",
        evidence="proof",
        severity="S1",
        explains=(
            "underfitting",
            "learning_rate_too_high",
            "learning_rate_too_low",
            "loss_spike",
            "gradient_norm_spike",
        ),
        requires=("steps.learning_rate", "steps.planned_learning_rate"),
        panel=2,
    ),
    Diagnosis(
        name="learning_rate_too_high",
        title="Learning rate too high",
        question="Are the updates large against the weights, and does the run suffer from it?",
        meaning="Each update overshoots: attention saturates, the loss stalls or jumps.",
        remedy="Divide the learning rate by 3 to 10, or warm up for longer.",
        source=(
            "median update ratio above 1e-2 with collapsed attention, a loss that does not fall or does not "
            "come back, or spikes"
        ),
        evidence="signature",
        severity="S2",
        explains=(
            "attention_entropy_collapse",
            "exploding_gradients",
            "vanishing_gradients",
            "dead_units",
            "underfitting",
            "nonfinite_value",
            "overfitting",
            "bad_batch",
            "loss_spike",
            "gradient_norm_spike",
        ),
        requires=(
            "update.l2_norm",
            "weight.l2_norm",
            "tensor_names.shape",
            "tensor_names.role",
            "attention.entropy",
            "steps.train_loss",
            "steps.gradient_norm",
        ),
        panel=2,
    ),
    Diagnosis(
        name="learning_rate_too_low",
        title="Learning rate too low",
        question="Are updates tiny, at the peak rate with gradients that still agree or far below the plan?",
        meaning="The run crawls: an update changes so little that the next gradient asks for the same again.",
        remedy="Raise the peak learning rate by 3 to 10.",
        source=(
            "update ratio below 2e-3 where consecutive gradients agree near the peak rate, "
            "or where the rate is below a fifth of the declared one"
        ),
        evidence="signature",
        severity="S2",
        explains=("underfitting",),
        requires=(
            "steps.learning_rate",
            "steps.gradient_cosine_previous",
            "update.l2_norm",
            "weight.l2_norm",
            "tensor_names.shape",
        ),
        panel=2,
    ),
    Diagnosis(
        name="weight_decay_too_strong",
        title="Weight decay too strong",
        question="Do the weight matrices shrink together, fast or to a fraction of their first size?",
        meaning=(
            "Decay outweighs the gradients: scores shrink, attention turns uniform, updates grow against "
            "the weights."
        ),
        remedy="Lower the weight decay, and leave norms and biases out of it.",
        source="median over matrices of norm / first norm below 0.7, or shrinking by more than 0.1% a step",
        evidence="signature",
        severity="S2",
        explains=(
            "learning_rate_too_high",
            "underfitting",
            "vanishing_gradients",
        ),
        requires=(
            "weight.l2_norm",
            "tensor_names.shape",
            "tensor_names.role",
        ),
        panel=5,
    ),
)
