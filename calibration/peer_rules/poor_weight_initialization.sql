-- Do the first steps show activations of unequal variance, or narrow gradients with a loss that does not fall?
-- Source: Amazon SageMaker Developer Guide, "List of Debugger built-in rules", PoorWeightInitialization: threshold 10,
-- distribution_range 0.001, patience 5, steps 10
-- (awsdocs/amazon-sagemaker-developer-guide, doc_source/debugger-built-in-rules.md at c6db92f).
-- The variance of a ReLU's output stands for that of its input: the two are proportional for inputs around zero. The
-- 5th to 95th percentile of a gradient is 3.29 standard deviations, as for a normal distribution.
-- Read in the peer's favour: narrow gradients count only where the loss does not fall either. Alone they would be
-- found in every healthy run whose objective is a mean over tokens.
CREATE OR REPLACE MACRO poor_weight_initialization(
    variance_ratio_threshold := 10, -- 1, largest / smallest variance of the layers' activations within a step
    distribution_range := 1e-3, -- objective/weight, 5th to 95th percentile of a gradient
    patience_steps := 5, -- steps without a new lowest loss
    analyzed_steps := 10 -- steps from the first on
) AS TABLE
WITH starts AS (
    SELECT run, min(step) AS start_step FROM steps WHERE rank = 0 GROUP BY run
),
variance_ratios AS (
    SELECT
        tensors.run, step, max(CAST(std AS DOUBLE) ** 2) / nullif(min(CAST(std AS DOUBLE) ** 2), 0) AS ratio,
        arg_min(name, std) AS narrowest
    FROM tensors
    JOIN tensor_names USING (run, rank, segment, tensor_id)
    JOIN starts ON starts.run = tensors.run AND step < start_step + analyzed_steps
    WHERE kind = 'activation' AND rank = 0 AND role = 'relu'
    GROUP BY tensors.run, step
),
narrow_gradients AS (
    SELECT tensors.run, arg_min(name, std) AS narrowest, min(3.29 * CAST(std AS DOUBLE)) AS range
    FROM tensors
    JOIN tensor_names USING (run, rank, segment, tensor_id)
    JOIN starts ON starts.run = tensors.run AND step < start_step + analyzed_steps
    WHERE kind = 'gradient' AND rank = 0 AND name NOT LIKE '%bias%'
    GROUP BY tensors.run
),
first_losses AS (
    SELECT
        steps.run, step,
        step - max(step) FILTER (WHERE is_lowest) OVER (PARTITION BY steps.run ORDER BY step) AS waited_steps
    FROM (
        SELECT
            run, step,
            coalesce(train_loss < min(train_loss) OVER (
                PARTITION BY run ORDER BY step ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ), true) AS is_lowest
        FROM steps
        WHERE rank = 0 AND isfinite(train_loss)
    ) AS steps
    JOIN starts ON starts.run = steps.run AND step < start_step + analyzed_steps
),
stalls AS (
    SELECT run, min(step) AS step, max(waited_steps) AS waited_steps
    FROM first_losses
    WHERE waited_steps >= patience_steps
    GROUP BY run
),
verdicts AS (
    SELECT
        run, step, narrowest AS subject, ratio AS observed, CAST(variance_ratio_threshold AS DOUBLE) AS threshold,
        'largest variance of the activations / that of the narrowest layer' AS detail
    FROM variance_ratios
    WHERE ratio > variance_ratio_threshold
    UNION ALL
    SELECT
        run, step, narrowest, range, CAST(distribution_range AS DOUBLE),
        format('narrow gradients, and no new lowest loss in {} steps', waited_steps)
    FROM narrow_gradients
    JOIN stalls USING (run)
    WHERE range < distribution_range
)
SELECT
    run, -- run directory
    step AS first_step, -- optimizer updates
    step AS last_step, -- optimizer updates
    subject, -- module or weight
    observed, -- 1 or objective/weight
    threshold, -- 1 or objective/weight
    detail -- text
FROM verdicts
ORDER BY run, step, subject;
