"""Rules about resuming, repeating and evaluating a run: all of them proofs over hashes and counts."""

from __future__ import annotations

from analyzer.diagnoses.declaration import REPEATED_EVALUATION, RESUMED_EVENT, SECOND_RUN, Diagnosis

REPRODUCTION_AND_EVALUATION = (
    Diagnosis(
        name="optimizer_state_lost",
        title="Optimizer state lost on resume",
        question="Did a resume begin with another optimizer state than its checkpoint holds?",
        meaning=(
            "Moments and counters start anew: the first updates are as large as a new run's, without warmup."
        ),
        remedy="Save and load the optimizer's state with the weights, and compare its hash after loading.",
        source="hash of the optimizer state in the checkpoint and at the first row after the resume",
        evidence="proof",
        severity="S2",
        explains=("underfitting", "loss_spike", "gradient_norm_spike", "learning_rate_too_high", "bad_batch"),
        requires=(RESUMED_EVENT, "steps.optimizer_hash"),
        panel=1,
    ),
    Diagnosis(
        name="schedule_reset_on_resume",
        title="Schedule reset on resume",
        question="Did a resume begin with another learning rate than the plan asks for at its step?",
        meaning=(
            "The schedule counts from another step than the weights: the ramp is run twice, the decay too "
            "late."
        ),
        remedy="Save and load the scheduler's step, or compute the rate from the global step.",
        source="applied against planned rate at the first row of a segment",
        evidence="proof",
        severity="S1",
        explains=(
            "underfitting",
            "schedule_not_followed",
            "loss_spike",
            "gradient_norm_spike",
            "learning_rate_too_high",
        ),
        requires=(RESUMED_EVENT, "steps.learning_rate", "steps.planned_learning_rate"),
        panel=2,
    ),
    Diagnosis(
        name="data_replayed_on_resume",
        title="Data replayed on resume",
        question="Did a resume begin at another place in the data than its checkpoint holds?",
        meaning="Some examples are seen again within their epoch and others not at all.",
        remedy="Save and load epoch, position and order of the data iterator with the weights.",
        source=(
            "epoch and position in the checkpoint and at the first row, and batch hashes across the boundary"
        ),
        evidence="proof",
        severity="S1",
        explains=("data_not_shuffled",),
        requires=(RESUMED_EVENT, "steps.epoch", "steps.data_position", "steps.batch_hash"),
        panel=1,
    ),
    Diagnosis(
        name="random_state_lost_on_resume",
        title="Random state lost on resume",
        question="Did a resume begin with another random state than its checkpoint holds?",
        meaning="Dropout and augmentation draw other numbers than the uninterrupted run would have drawn.",
        remedy="Save and load the state of every random generator, not its seed.",
        source="hash of the generator's state in the checkpoint and at the first row after the resume",
        evidence="proof",
        severity="S1",
        explains=(),
        requires=(RESUMED_EVENT, "steps.rng_hash"),
        panel=1,
    ),
    Diagnosis(
        name="nondeterminism",
        title="Nondeterminism",
        question="Do two runs of one seed, configuration and environment part, and where first?",
        meaning="Something outside the seed decides: the order of sums, of files or of threads, or a clock.",
        remedy=(
            "Pin threads and algorithms, seed every generator, sort what is listed; start at the named "
            "tensor."
        ),
        source="first differing hash of batches and weights, in the order of a step",
        evidence="proof",
        severity="S1",
        explains=(),
        requires=(SECOND_RUN, "steps.batch_hash", "weight.content_hash", "tensor_names.name"),
        panel=1,
    ),
    Diagnosis(
        name="evaluation_in_training_mode",
        title="Evaluation in training mode",
        question="Do two evaluations of the same weights on the same split give different losses?",
        meaning="Dropout or batch statistics are active while evaluating: losses are noisy and too high.",
        remedy="Switch the model to evaluation mode around every evaluation, and back afterwards.",
        source="equal hash of the weights, different sum of losses",
        evidence="proof",
        severity="S2",
        explains=("overfitting",),
        requires=(
            REPEATED_EVALUATION,
            "evaluations.weights_hash",
            "evaluations.loss_sum",
            "evaluations.token_count",
        ),
        panel=1,
    ),
    Diagnosis(
        name="stale_evaluation_weights",
        title="Stale weights evaluated",
        question="Are weights evaluated that the training has left behind?",
        meaning="The evaluated copy is not refreshed: its loss tells of an earlier step.",
        remedy="Copy the live weights before each evaluation, or evaluate the live model.",
        source="hash of the evaluated weights against the live ones of the same step",
        evidence="proof",
        severity="S3",
        explains=("overfitting", "underfitting"),
        requires=("evaluations.weights_hash", "steps.weights_hash"),
        panel=1,
    ),
)
