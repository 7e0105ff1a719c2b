-- Is the sum of the token losses backpropagated although the run declares their mean?
-- Source: the objective against loss_sum and the counts of the same step, so that the factor is known, not guessed.
-- Adam is nearly blind to a constant factor: what suffers is clipping, its epsilon, and every comparison.
CREATE OR REPLACE MACRO loss_summed_not_averaged(
    -- Summing n float32 in any order errs by at most n 2^-24 of their sum: 1e-3 up to 16,000 tokens. The factors
    -- that are told apart here differ by 2 or more.
    relative_tolerance := 0.001, -- 1
    least_factor := 1.5 -- 1, objective / mean loss
) AS TABLE
WITH factors AS (
    SELECT
        steps.run, step, objective, train_loss, loss_token_count, example_count,
        objective / nullif(train_loss * coalesce(loss_scale, 1), 0) AS factor,
        count(*) OVER (PARTITION BY steps.run) AS row_count
    FROM steps
    JOIN runs ON runs.run = steps.run
        AND regexp_matches(lower(loss_reduction), 'mean|averag|per token|/|divided|normali[sz]ed')
    WHERE rank = 0 AND isfinite(objective) AND isfinite(train_loss) AND coalesce(accumulation_count, 1) = 1
),
summed AS (
    SELECT
        run, step, objective, train_loss, factor, row_count,
        CASE
            WHEN abs(factor / loss_token_count - 1) <= relative_tolerance THEN 'tokens'
            WHEN abs(factor / example_count - 1) <= relative_tolerance THEN 'examples'
            WHEN abs(factor * example_count / loss_token_count - 1) <= relative_tolerance THEN 'tokens per example'
        END AS counted
    FROM factors
    WHERE factor >= least_factor
)
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    'objective' AS subject, -- quantity
    arg_min(factor, step) AS observed, -- 1, objective / mean loss at the first such step
    any_value(CAST(least_factor AS DOUBLE)) AS threshold, -- 1
    format(
        'objective {:.4g} at step {} where the mean loss is {:.4g} nats/token: a factor of {:.4g}, the number of {}; '
        || '{} of {} steps',
        arg_min(objective, step), min(step), arg_min(train_loss, step), arg_min(factor, step),
        arg_min(counted, step), count(*), any_value(row_count)
    ) AS detail -- text
FROM summed
WHERE counted IS NOT NULL
GROUP BY run
ORDER BY run;
