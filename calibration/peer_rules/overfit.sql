-- Is the held-out loss more than a tenth above the training loss?
-- Source: Amazon SageMaker Developer Guide, "List of Debugger built-in rules", Overfit: start_step 0, patience 1,
-- ratio_threshold 0.1 (awsdocs/amazon-sagemaker-developer-guide, doc_source/debugger-built-in-rules.md at c6db92f).
-- The mean training loss is over the steps since the evaluation before, as a loop logs it, regularisation included.
CREATE OR REPLACE MACRO overfit(
    ratio_threshold := 0.1, -- 1, (validation loss - training loss) / training loss
    patience := 1, -- evaluations in a row
    start_step := 0 -- optimizer updates
) AS TABLE
WITH validation_losses AS (
    SELECT
        evaluations.run, step, split, loss_sum / nullif(token_count, 0) AS loss,
        lag(step, 1, -1) OVER (PARTITION BY evaluations.run ORDER BY step) AS previous_step
    FROM evaluations
    JOIN runs ON runs.run = evaluations.run AND evaluations.split = runs.primary_split
    WHERE rank = 0 AND coalesce(repeat, 0) = 0
),
gaps AS (
    SELECT
        validation.run, validation.step, split, any_value(validation.loss) AS validation_loss,
        avg(train_loss) AS train_loss
    FROM validation_losses AS validation
    JOIN steps ON steps.run = validation.run
        AND steps.rank = 0
        AND steps.step < validation.step
        AND steps.step >= previous_step
        AND isfinite(train_loss)
    WHERE validation.step >= start_step AND isfinite(validation.loss)
    GROUP BY validation.run, validation.step, split
),
ratios AS (
    SELECT
        run, step, split, validation_loss, train_loss,
        (validation_loss - train_loss) / nullif(train_loss, 0) AS ratio,
        min((validation_loss - train_loss) / nullif(train_loss, 0)) OVER last_rows AS least_ratio,
        count(*) OVER last_rows AS row_count
    FROM gaps
    WINDOW last_rows AS (PARTITION BY run ORDER BY step ROWS BETWEEN patience - 1 PRECEDING AND CURRENT ROW)
)
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    any_value(split) AS subject, -- data split
    max(ratio) AS observed, -- 1
    any_value(CAST(ratio_threshold AS DOUBLE)) AS threshold, -- 1
    format(
        '{:.3g} nats/token versus {:.3g} in training at step {}',
        arg_min(validation_loss, step), arg_min(train_loss, step), min(step)
    ) AS detail -- text
FROM ratios
WHERE row_count = patience AND least_ratio > ratio_threshold
GROUP BY run
ORDER BY run;
