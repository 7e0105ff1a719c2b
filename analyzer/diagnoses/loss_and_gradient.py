"""Rules about how the loss is reduced and how its gradient reaches the weights; and the two anomalies."""

from __future__ import annotations

from analyzer.diagnoses.declaration import Diagnosis

LOSS_AND_GRADIENT = (
    Diagnosis(
        name="padding_in_loss",
        title="Padding counted in the loss",
        question="Does the loss count more tokens than the batch has?",
        meaning=(
            "Padding is predicted too: easy tokens dilute the loss and pull the weights towards the padding."
        ),
        remedy="Leave padded targets out of the sum and of the number that it is divided by.",
        source="integer counts of the same batch: tokens in the loss against targets that are no padding",
        evidence="proof",
        severity="S2",
        explains=("underfitting", "loss_below_entropy_floor", "loss_spike", "gradient_norm_spike"),
        requires=("steps.loss_token_count", "steps.non_padding_token_count"),
        panel=1,
    ),
    Diagnosis(
        name="loss_summed_not_averaged",
        title="Loss summed instead of averaged",
        question="Is a sum of losses backpropagated although the run declares a mean?",
        meaning=(
            "The gradient grows with the number of tokens: every step is clipped, and a long batch weighs "
            "more."
        ),
        remedy="Divide the objective by the number of counted tokens, as the declared reduction says.",
        source="objective against loss_sum and the counts of the same step",
        evidence="proof",
        severity="S1",
        explains=("underfitting", "exploding_gradients", "gradient_norm_spike"),
        requires=("manifest.loss_reduction", "steps.objective", "steps.train_loss", "steps.loss_token_count"),
        panel=3,
    ),
    Diagnosis(
        name="accumulation_not_normalised",
        title="Accumulation not normalised",
        question="Is the objective of an accumulated step another one than the mean over its tokens?",
        meaning="The gradient is k times too large, or tokens of short micro-batches weigh more.",
        remedy="Divide each micro-batch's summed loss by the number of tokens of the whole step.",
        source="objective against sums and counts of the micro-batches",
        evidence="proof",
        severity="S1",
        explains=(
            "underfitting",
            "loss_summed_not_averaged",
            "exploding_gradients",
            "bad_batch",
            "loss_spike",
            "gradient_norm_spike",
        ),
        requires=(
            "steps.objective",
            "micro_batches.loss_sum",
            "micro_batches.loss_token_count",
        ),
        panel=3,
    ),
    Diagnosis(
        name="gradients_not_zeroed",
        title="Gradients not zeroed",
        question="Does every gradient contain the one before it?",
        meaning="Old gradients are added to new ones: the update follows a sum over many steps.",
        remedy="Zero the gradients before each backward pass.",
        source=(
            "cosine with the gradient before above 0.7, and a projection on it that is as long as that "
            "gradient"
        ),
        evidence="signature",
        severity="S2",
        explains=(
            "exploding_gradients",
            "attention_entropy_collapse",
            "dead_units",
            "learning_rate_too_high",
            "underfitting",
            "vanishing_gradients",
            "weight_decay_too_strong",
            "bad_batch",
            "loss_spike",
            "gradient_norm_spike",
        ),
        requires=(
            "steps.gradient_norm",
            "steps.gradient_cosine_previous",
        ),
        panel=3,
    ),
    Diagnosis(
        name="vanishing_gradients",
        title="Vanishing gradients",
        question="Does an early block get far smaller gradients than a later one, step after step?",
        meaning="The signal dies on its way back: early blocks stay near their first state.",
        remedy="Add residual connections and normalisation, and check the gain of the initialisation.",
        source="ratio of gradient sizes between blocks below 0.03 over twenty recorded steps",
        evidence="signature",
        severity="S2",
        explains=("initialisation_too_small", "dead_units", "underfitting"),
        requires=(
            "gradient.l2_norm",
            "gradient.element_count",
            "tensor_names.layer",
        ),
        panel=6,
    ),
    Diagnosis(
        name="exploding_gradients",
        title="Exploding gradients",
        question="Did the gradient norm jump and stay far above its level, unbounded by clipping?",
        meaning=(
            "Each backward pass multiplies errors instead of passing them on; steps are dominated by rare "
            "directions."
        ),
        remedy="Clip the gradient's norm, lower the learning rate, and find the block whose weights grew.",
        source="sustained level of the gradient norm against the run's own past",
        evidence="signature",
        severity="S2",
        explains=(
            "attention_entropy_collapse",
            "vanishing_gradients",
            "underfitting",
            "bad_batch",
            "loss_spike",
            "gradient_norm_spike",
        ),
        requires=(
            "steps.gradient_norm",
            "steps.clipped_gradient_norm",
        ),
        panel=3,
    ),
    Diagnosis(
        name="frozen_layer",
        title="Frozen layer",
        question="Did a trainable weight stay the same although it got a gradient and a learning rate?",
        meaning=(
            "The optimizer does not update this tensor: it is not in its parameter groups, or the wrong "
            "copy is."
        ),
        remedy=(
            "Pass the parameter to the optimizer, after the model has its final parameters; or declare the "
            "freeze."
        ),
        source="content hashes: an update that is not zero changes some bit",
        evidence="proof",
        severity="S2",
        explains=(
            "underfitting",
            "learning_rate_too_low",
        ),
        requires=(
            "weight.content_hash",
            "gradient.l2_norm",
            "gradient.element_count",
            "steps.learning_rate",
            "tensor_names.name",
        ),
        panel=5,
    ),
    Diagnosis(
        name="detached_branch",
        title="Detached branch",
        question="Does a trainable weight get no gradient at all while others do?",
        meaning=(
            "The loss does not depend on this tensor: the graph is cut before it, or its output is not used."
        ),
        remedy="Look for detach, stop-gradient, a no-grad block or an unused output between it and the loss.",
        source="exact zeros over whole tensors, several recorded steps in a row",
        evidence="proof",
        severity="S2",
        explains=("underfitting",),
        requires=("gradient.has_gradient", "gradient.l2_norm", "tensor_names.name"),
        panel=6,
    ),
    Diagnosis(
        name="nonfinite_value",
        title="Non-finite value",
        question="Did any recorded quantity turn NaN or infinite, and which was first?",
        meaning="Arithmetic left the range of the number format; everything computed from the value is lost.",
        remedy="Resume from a checkpoint before this step; make that operation stable or its input smaller.",
        source="counts of NaN and infinite elements, in the order in which a step computes them",
        evidence="proof",
        severity="S4",
        explains=(
            "underfitting",
            "detached_branch",
            "frozen_layer",
            "loss_spike",
            "gradient_norm_spike",
            "dead_units",
        ),
        requires=("steps.train_loss",),
        panel=1,
    ),
    Diagnosis(
        name="loss_spike",
        title="Loss spike",
        question="Did the training loss jump far above its own recent noise?",
        meaning="One or more updates or batches were unlike those before; consistent with many causes.",
        remedy="Look at the batch of that step; if spikes return, lower the learning rate or clip harder.",
        source="robust z of ln(loss) above 6, calibrated on healthy and injected runs",
        evidence="anomaly",
        severity="S1",
        explains=("gradient_norm_spike",),
        requires=("steps.train_loss",),
        panel=1,
    ),
    Diagnosis(
        name="gradient_norm_spike",
        title="Gradient norm spike",
        question="Did the gradient norm jump far above its own recent noise?",
        meaning="One batch or one region of the loss pulled much harder than those before.",
        remedy="Look at the batch of that step and at which layer moved first; clip the gradient's norm.",
        source="robust z of ln(gradient norm) above 6 and at least four times its baseline",
        evidence="anomaly",
        severity="S1",
        explains=(),
        requires=("steps.gradient_norm",),
        panel=3,
    ),
)
