-- Held-out loss of every pair of two labels at one evaluation: verb by tense, or any other two.
-- Source: example_losses, token-weighted over finite examples.
CREATE OR REPLACE MACRO loss_map(
    row_label := NULL, -- label column of examples; NULL: the manifest's label for map rows
    column_label := NULL, -- label column of examples; NULL: the manifest's label for map columns
    split_name := NULL, -- data split; NULL: the manifest's primary split
    at_step := NULL -- optimizer updates; the last evaluation up to it; NULL: the last one
) AS TABLE
WITH candidate_losses AS (
    SELECT
        losses.run, losses.step, losses.loss_sum, losses.token_count,
        rows_of_map.value AS row_value, columns_of_map.value AS column_value,
        max(losses.step) OVER (PARTITION BY losses.run) AS last_step
    FROM example_losses AS losses
    JOIN runs ON runs.run = losses.run AND losses.split = coalesce(split_name, runs.primary_split)
    JOIN example_labels AS rows_of_map ON rows_of_map.run = losses.run
        AND rows_of_map.example_id = losses.example_id
        AND rows_of_map.label = coalesce(row_label, runs.map_row_label)
    JOIN example_labels AS columns_of_map ON columns_of_map.run = losses.run
        AND columns_of_map.example_id = losses.example_id
        AND columns_of_map.label = coalesce(column_label, runs.map_column_label)
    WHERE losses.rank = 0 AND (at_step IS NULL OR losses.step <= at_step)
)
SELECT
    run, -- run directory
    step, -- optimizer updates
    row_value, -- value of the row's label
    column_value, -- value of the column's label
    sum(loss_sum) FILTER (WHERE isfinite(loss_sum))
        / nullif(sum(token_count) FILTER (WHERE isfinite(loss_sum)), 0) AS loss, -- nats/token, finite examples
    CAST(sum(token_count) AS BIGINT) AS token_count, -- tokens
    count(*) FILTER (WHERE NOT isfinite(loss_sum)) AS nonfinite_count -- examples whose loss is not finite
FROM candidate_losses
WHERE step = last_step
GROUP BY run, step, row_value, column_value
ORDER BY run, row_value, column_value;
