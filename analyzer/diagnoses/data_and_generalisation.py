"""Rules about the data that are read and about what is learned beyond them."""

from __future__ import annotations

from analyzer.diagnoses.declaration import TRAINING_LOSS, Diagnosis

DATA_AND_GENERALISATION = (
    Diagnosis(
        name="data_not_shuffled",
        title="Data not shuffled",
        question="Do two epochs in a row visit the examples in the same order?",
        meaning=(
            "Every epoch repeats the same batches: their noise no longer averages out, the order is learned."
        ),
        remedy="Shuffle at the start of each epoch, with a generator that moves on from epoch to epoch.",
        source="hash of each epoch's order",
        evidence="proof",
        severity="S2",
        explains=("bad_batch", "loss_spike", "gradient_norm_spike"),
        requires=("steps.order_hash", "steps.epoch"),
        panel=1,
    ),
    Diagnosis(
        name="train_validation_leak",
        title="Evaluation examples in the training data",
        question="Are examples of another split in the training data?",
        meaning="The loss on that split measures memory, not generalisation.",
        remedy="Split again, by the unit that must be new, and test that no full sequence is in two splits.",
        source="hashes of full token sequences in both splits",
        evidence="proof",
        severity="S3",
        explains=("loss_below_entropy_floor",),
        requires=("examples.split", "examples.content_hash"),
        panel=1,
    ),
    Diagnosis(
        name="loss_below_entropy_floor",
        title="Loss below the entropy floor",
        question="Is an evaluation loss lower than any causal model can reach on that split?",
        meaning="The model sees the future, the targets leaked into the input, or the loss is miscounted.",
        remedy="Change one token and see that no earlier prediction moves; check how the loss is reduced.",
        source="prefix-tree entropy of the enumerated split: the least loss of any function of the prefix",
        evidence="proof",
        severity="S3",
        explains=(),
        requires=("manifest.entropy_floor", "evaluations.loss_sum", "evaluations.token_count"),
        panel=1,
    ),
    Diagnosis(
        name="overfitting",
        title="Overfitting",
        question="Does held-out loss rise, beyond its uncertainty, while training loss keeps falling?",
        meaning="The model learns its training examples by heart and grows overconfident on others.",
        remedy="Keep the checkpoint of the minimum, or regularise: dropout, weight decay, more data.",
        source="paired per-example differences, delete-one-cluster jackknife, three evaluations in a row",
        evidence="signature",
        severity="S2",
        explains=(),
        requires=(
            "manifest.primary_split",
            "example_losses.loss_sum",
            "example_losses.token_count",
            TRAINING_LOSS,
        ),
        panel=1,
    ),
    Diagnosis(
        name="bad_batch",
        title="Bad batch",
        question="Did one batch have a far higher loss than its neighbours, with the model unharmed?",
        meaning=(
            "The examples of this batch are unlike the others: broken, mislabelled, or from another source."
        ),
        remedy=(
            "Inspect the examples of the batch; replay it on an earlier checkpoint to tell data from state."
        ),
        source="a loss spike that is over within three steps",
        evidence="signature",
        severity="S2",
        explains=(
            "loss_spike",
            "gradient_norm_spike",
        ),
        requires=(
            "steps.train_loss",
            "steps.batch_hash",
        ),
        panel=1,
    ),
    Diagnosis(
        name="underfitting",
        title="Underfitting",
        question="Has the loss stopped falling far above its floor, at a rate that could still move it?",
        meaning=(
            "The model cannot represent the data better, or something holds it back that no other rule sees."
        ),
        remedy="Give it more width or depth; check inputs and targets if that does not help.",
        source=(
            "excess over the entropy floor of the training split and how much of it the last third took off"
        ),
        evidence="signature",
        severity="S2",
        explains=(),
        requires=(
            "manifest.entropy_floor",
            "evaluations.loss_sum",
            "evaluations.token_count",
            "steps.learning_rate",
        ),
        panel=1,
    ),
    Diagnosis(
        name="label_noise",
        title="Label noise",
        question=(
            "Does the hardest twentieth of the training examples stay hard while the others are learned?"
        ),
        meaning="Some examples contradict the rest: they are learned last, one by one, by heart.",
        remedy="Read the named examples; correct or drop those whose label is wrong.",
        source=(
            "95% quantile of the answer losses against their median, over the last third of the run so far"
        ),
        evidence="signature",
        severity="S1",
        explains=(),
        requires=(
            "example_losses.answer_loss_sum",
            "example_losses.answer_token_count",
        ),
        panel=7,
    ),
)
