-- Since when held-out loss rises while training loss falls: one row per minimum that was left behind.
-- Source: loss_rise_by_step; the same minimum must be exceeded at consecutive evaluations (fixed 10% gap rules fired
-- on every healthy run). Provisional: a later, lower minimum (grokking, double descent) supersedes a row.
CREATE OR REPLACE MACRO overfit_onset(
    split_name := NULL, -- data split; NULL: the manifest's primary split
    cluster_name := NULL, -- label column that is the sampling unit; NULL: the manifest's, else each example
    train_split := 'train', -- name of the split that was trained on
    rise_threshold := 0.02, -- nats/token, 2% of perplexity: a smaller rise may be certain, but costs nothing
    consecutive_count := 3 -- evaluations in a row, so that one bad evaluation is no onset
) AS TABLE
WITH train_losses AS (
    SELECT run, step, loss_sum / nullif(token_count, 0) AS evaluated_loss
    FROM evaluations
    WHERE split = train_split AND rank = 0 AND coalesce(repeat, 0) = 0
),
train_means AS ( -- where the training split is not evaluated: the last 50 training steps, dropout and all
    SELECT run, step + 1 AS step, avg(train_loss) FILTER (WHERE isfinite(train_loss)) OVER (
        PARTITION BY run ORDER BY step ROWS BETWEEN 49 PRECEDING AND CURRENT ROW
    ) AS recent_loss
    FROM steps
    WHERE rank = 0
),
judged_evaluations AS (
    SELECT
        rises.run, rises.split, rises.step, loss, minimum_step, minimum_loss, lower,
        coalesce(
            lower > 0
                AND rise >= rise_threshold
                AND coalesce(train_now.evaluated_loss, mean_now.recent_loss)
                    < coalesce(train_best.evaluated_loss, mean_best.recent_loss),
            false
        ) AS is_rising
    FROM loss_rise_by_step(split_name := split_name, cluster_name := cluster_name) AS rises
    LEFT JOIN train_losses AS train_now ON train_now.run = rises.run AND train_now.step = rises.step
    LEFT JOIN train_losses AS train_best ON train_best.run = rises.run AND train_best.step = minimum_step
    LEFT JOIN train_means AS mean_now ON mean_now.run = rises.run AND mean_now.step = rises.step
    LEFT JOIN train_means AS mean_best ON mean_best.run = rises.run AND mean_best.step = minimum_step
),
confirmations AS (
    SELECT
        run, split, step, loss, minimum_step, minimum_loss, lower,
        count(*) FILTER (WHERE is_rising) OVER (
            PARTITION BY run, split, minimum_step ORDER BY step
            ROWS BETWEEN consecutive_count - 1 PRECEDING AND CURRENT ROW
        ) AS rising_count,
        min(loss) OVER (PARTITION BY run, split) AS lowest_loss
    FROM judged_evaluations
)
SELECT
    run, -- run directory
    split, -- data split
    minimum_step, -- optimizer updates, evaluation with the lowest loss so far
    min(step) AS confirmed_step, -- optimizer updates, evaluation that completes the proof
    any_value(minimum_loss) AS minimum_loss, -- nats/token
    arg_min(loss, step) AS confirmed_loss, -- nats/token at confirmed_step
    arg_min(lower, step) AS lower_bound, -- nats/token, rise that is certain at confirmed_step
    any_value(lowest_loss < minimum_loss) AS is_superseded -- a later evaluation is lower than this minimum
FROM confirmations
WHERE rising_count >= consecutive_count
GROUP BY run, split, minimum_step
ORDER BY run, split, minimum_step;
