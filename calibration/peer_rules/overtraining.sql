-- Have both the training and the held-out loss stopped finding new optima?
-- Source: Amazon SageMaker Developer Guide, "List of Debugger built-in rules", Overtraining: patience_train 5,
-- patience_validation 10, delta 0.1
-- (awsdocs/amazon-sagemaker-developer-guide, doc_source/debugger-built-in-rules.md at c6db92f).
-- A step of validation is an evaluation of the primary split. A loss has stopped when the lowest of the last
-- `patience` ones is less than delta below the lowest before; read in the peer's favour, both must have.
CREATE OR REPLACE MACRO overtraining(
    patience_train := 5, -- steps
    patience_validation := 10, -- evaluations
    delta := 0.1 -- nats/token
) AS TABLE
WITH validation_losses AS (
    SELECT evaluations.run, step, split, loss_sum / nullif(token_count, 0) AS loss
    FROM evaluations
    JOIN runs ON runs.run = evaluations.run AND evaluations.split = runs.primary_split
    WHERE rank = 0 AND coalesce(repeat, 0) = 0
),
validation_gains AS (
    SELECT run, step, split, min(loss) OVER before - min(loss) OVER recent AS gain
    FROM validation_losses
    WHERE isfinite(loss)
    WINDOW
        recent AS (PARTITION BY run ORDER BY step ROWS BETWEEN patience_validation - 1 PRECEDING AND CURRENT ROW),
        before AS (
            PARTITION BY run ORDER BY step ROWS BETWEEN UNBOUNDED PRECEDING AND patience_validation PRECEDING
        )
),
train_gains AS (
    SELECT run, step, min(train_loss) OVER before - min(train_loss) OVER recent AS gain
    FROM steps
    WHERE rank = 0 AND isfinite(train_loss)
    WINDOW
        recent AS (PARTITION BY run ORDER BY step ROWS BETWEEN patience_train - 1 PRECEDING AND CURRENT ROW),
        before AS (PARTITION BY run ORDER BY step ROWS BETWEEN UNBOUNDED PRECEDING AND patience_train PRECEDING)
)
SELECT
    validation.run, -- run directory
    min(validation.step) AS first_step, -- optimizer updates
    max(validation.step) AS last_step, -- optimizer updates
    any_value(split) AS subject, -- data split
    arg_min(validation.gain, validation.step) AS observed, -- nats/token, gain of the last evaluations
    any_value(CAST(delta AS DOUBLE)) AS threshold, -- nats/token
    format(
        'training gained {:.3g} nats/token over the lowest before', arg_min(train.gain, validation.step)
    ) AS detail -- text
FROM validation_gains AS validation
JOIN train_gains AS train ON train.run = validation.run
    AND train.step = validation.step - 1 -- an evaluation at step s follows the update of step s - 1
WHERE validation.gain < delta AND train.gain < delta
GROUP BY validation.run
ORDER BY validation.run;
