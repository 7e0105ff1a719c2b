-- Is the objective of an accumulated step another one than the mean over all of its tokens?
-- Source: sums and counts of the micro-batches. k means that are summed give k times the mean; k means that are
-- averaged weigh the tokens of a short micro-batch more, which only equal token counts make right.
CREATE OR REPLACE MACRO accumulation_not_normalised(
    -- Summing n float32 in any order errs by at most n 2^-24 of their sum: 1e-3 up to 16,000 tokens.
    relative_tolerance := 0.001 -- 1
) AS TABLE
WITH micro_means AS (
    SELECT
        micro_batches.run, step, count(*) AS micro_count,
        avg(micro_batches.loss_sum / nullif(micro_batches.loss_token_count, 0)) AS mean_of_means,
        sum(micro_batches.loss_sum) / nullif(sum(micro_batches.loss_token_count), 0) AS token_mean,
        avg(micro_batches.gradient_norm) FILTER (WHERE isfinite(micro_batches.gradient_norm)) AS own_norm
    FROM micro_batches
    WHERE rank = 0 AND isfinite(micro_batches.loss_sum)
    GROUP BY micro_batches.run, step
),
factors AS (
    SELECT
        steps.run, step, micro_count, gradient_norm, own_norm,
        objective / nullif(token_mean * coalesce(loss_scale, 1), 0) AS factor,
        objective / nullif(mean_of_means * coalesce(loss_scale, 1), 0) AS mean_factor,
        -- a declared mean over sequences is no mean over tokens, however it is accumulated
        coalesce(contains(lower(loss_reduction), 'over sequences'), false) AS is_by_sequence
    FROM steps
    JOIN micro_means USING (run, step)
    JOIN runs ON runs.run = steps.run
    WHERE rank = 0 AND isfinite(objective) AND micro_count > 1
),
wrong AS (
    SELECT
        run, step, micro_count, factor, gradient_norm, own_norm,
        CASE
            WHEN abs(mean_factor / micro_count - 1) <= relative_tolerance THEN 'their means are summed, not averaged'
            WHEN NOT is_by_sequence
                AND abs(mean_factor - 1) <= relative_tolerance / 10
                AND abs(factor - 1) > relative_tolerance THEN 'their means are averaged, whatever their token counts'
        END AS error
    FROM factors
)
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    'objective' AS subject, -- quantity
    arg_min(factor, step) AS observed, -- 1, objective / mean over all tokens, at the first such step
    1 + any_value(CAST(relative_tolerance AS DOUBLE)) AS threshold, -- 1
    format(
        'the objective of {} micro-batches is {:.5g} times the mean over their tokens: {}; {} steps',
        arg_min(micro_count, step), arg_min(factor, step), arg_min(error, step), count(*)
    ) || coalesce(format(
        '; gradient norm {:.3g} where a micro-batch has {:.3g}', arg_min(gradient_norm, step), arg_min(own_norm, step)
    ), '') AS detail -- text
FROM wrong
WHERE error IS NOT NULL
GROUP BY run
ORDER BY run;
