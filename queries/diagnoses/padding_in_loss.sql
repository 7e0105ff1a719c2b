-- Does the loss count more tokens than the batch has?
-- Source: two counts of integers, so one token too many is proof. Fewer is a choice (answers only), not this fault.
CREATE OR REPLACE MACRO padding_in_loss(
    extra_token_threshold := 0 -- tokens
) AS TABLE
WITH counts AS (
    SELECT
        run, step, loss_token_count, non_padding_token_count,
        loss_token_count - non_padding_token_count AS extra_count,
        count(*) OVER (PARTITION BY run) AS row_count
    FROM steps
    WHERE rank = 0 AND loss_token_count IS NOT NULL AND non_padding_token_count IS NOT NULL
)
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    'loss_token_count' AS subject, -- quantity
    CAST(arg_min(extra_count, step) AS DOUBLE) AS observed, -- tokens, at the first such step
    any_value(CAST(extra_token_threshold AS DOUBLE)) AS threshold, -- tokens
    format(
        '{} tokens counted at step {}, {} of them no padding; {} of {} steps count padding, {:.3g}% of their tokens',
        arg_min(loss_token_count, step), min(step), arg_min(non_padding_token_count, step), count(*),
        any_value(row_count), 100 * sum(extra_count) / sum(loss_token_count)
    ) AS detail -- text
FROM counts
WHERE extra_count > extra_token_threshold
GROUP BY run
ORDER BY run;
