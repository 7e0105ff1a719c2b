-- How much worse a run does on held-out data than its control, the same run without the fault.
-- Source: per-example differences at the last evaluation that both have, so that the examples' own difficulty cancels;
-- delete-one-cluster jackknife (Efron & Stein 1981) and Student's t.
CREATE OR REPLACE MACRO control_gap(
    control_name := NULL, -- run name of the control among the opened runs; NULL: the first by name
    split_name := NULL, -- data split; NULL: the manifest's primary split
    cluster_name := NULL -- label column that is the sampling unit; NULL: the manifest's, else each example
) AS TABLE
WITH controls AS (
    SELECT coalesce(any_value(control_name), min(run)) AS control FROM runs
),
losses AS (
    SELECT example_losses.run, step, split, example_id, loss_sum, token_count
    FROM example_losses
    JOIN runs ON runs.run = example_losses.run AND split = coalesce(split_name, runs.primary_split)
    WHERE rank = 0 AND token_count > 0
),
common AS (
    SELECT mine.run, max(mine.step) AS step
    FROM (SELECT DISTINCT run, step FROM losses) AS mine
    JOIN (SELECT DISTINCT run, step FROM losses) AS theirs USING (step)
    JOIN controls ON theirs.run = control AND mine.run <> control
    GROUP BY mine.run
),
differences AS (
    SELECT
        common.run, common.step, control, mine.split,
        coalesce(cluster.value, CAST(mine.example_id AS VARCHAR)) AS cluster,
        mine.loss_sum - theirs.loss_sum * mine.token_count / theirs.token_count AS difference,
        mine.token_count
    FROM common
    CROSS JOIN controls
    JOIN losses AS mine ON mine.run = common.run AND mine.step = common.step
    JOIN losses AS theirs ON theirs.run = control
        AND theirs.step = common.step
        AND theirs.split = mine.split
        AND theirs.example_id = mine.example_id
    JOIN runs ON runs.run = common.run
    LEFT JOIN example_labels AS cluster ON cluster.run = common.run
        AND cluster.example_id = mine.example_id
        AND cluster.label = coalesce(cluster_name, runs.cluster_label)
    WHERE isfinite(theirs.loss_sum)
),
clusters AS (
    SELECT
        run, step, control, split, cluster,
        coalesce(sum(difference) FILTER (WHERE isfinite(difference)), 0) AS difference,
        coalesce(sum(token_count) FILTER (WHERE isfinite(difference)), 0) AS token_count,
        count(*) FILTER (WHERE NOT isfinite(difference)) AS nonfinite_count
    FROM differences
    GROUP BY run, step, control, split, cluster
),
deletions AS (
    SELECT
        run, step, control, split, difference, token_count, nonfinite_count,
        (sum(difference) OVER whole - difference)
            / nullif(sum(token_count) OVER whole - token_count, 0) AS gap_without_cluster
    FROM clusters
    WINDOW whole AS (PARTITION BY run)
),
gaps AS (
    SELECT
        run, step, control, split,
        sum(difference) / nullif(sum(token_count), 0) AS gap,
        count(*) AS cluster_count,
        CAST(sum(nonfinite_count) AS BIGINT) AS nonfinite_count,
        sqrt((count(*) - 1) * var_pop(gap_without_cluster)) AS standard_error
    FROM deletions
    GROUP BY run, step, control, split
)
SELECT
    run, -- run directory
    control, -- run directory of the control
    step, -- optimizer updates, last evaluation that both have
    split, -- data split
    gap, -- nats/token, positive: worse than the control
    gap - quantile * standard_error AS lower, -- nats/token, 95% interval; null with one cluster
    gap + quantile * standard_error AS upper, -- nats/token
    cluster_count, -- clusters
    nonfinite_count -- examples whose loss is not finite in this run
FROM gaps
LEFT JOIN t_quantiles ON degrees_of_freedom = least(cluster_count - 1, 31)
ORDER BY run;
