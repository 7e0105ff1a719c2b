-- Where two runs part: the first step and quantity whose hashes differ.
-- Source: hashes of batches and weights at steps that both runs recorded; within a step the data come first, then the
-- weights in the order of the forward pass. Two runs that are named are compared whatever they are; of the others those
-- of one seed, configuration, thread count and package versions: sums in another order are no fault.
CREATE OR REPLACE MACRO first_divergence(
    run_a := NULL, -- run name; NULL: every opened run
    run_b := NULL -- run name; NULL: every run that must repeat it
) AS TABLE
WITH environments AS (
    SELECT
        run,
        any_value(json_extract_string(payload, '$.environment.threads')) AS threads,
        any_value(json_extract_string(payload, '$.environment.packages')) AS packages
    FROM events_all
    WHERE kind = 'segment_started' AND rank = 0 AND json_valid(payload)
    GROUP BY run
),
pairs AS (
    SELECT one.run, other.run AS other_run
    FROM runs AS one
    JOIN runs AS other ON other.run <> one.run
        AND one.run = coalesce(run_a, one.run)
        AND other.run = coalesce(run_b, other.run)
    LEFT JOIN environments AS here ON here.run = one.run
    LEFT JOIN environments AS there ON there.run = other.run
    WHERE (run_a IS NOT NULL AND run_b IS NOT NULL)
        OR (
            other.seed = one.seed
            AND other.config = one.config
            AND here.threads IS NOT DISTINCT FROM there.threads
            AND here.packages IS NOT DISTINCT FROM there.packages
        )
),
hashes AS (
    SELECT run, step, 0 AS place, 'batch' AS quantity, batch_hash AS hash
    FROM steps
    WHERE rank = 0 AND batch_hash IS NOT NULL
    UNION ALL
    SELECT tensors.run, step, 1 + tensor_id, name, content_hash
    FROM tensors
    JOIN tensor_names USING (run, rank, segment, tensor_id)
    WHERE rank = 0 AND kind = 'weight' AND content_hash IS NOT NULL
),
differences AS (
    SELECT
        pairs.run, pairs.other_run, one.step, one.place, one.quantity, one.hash, other.hash AS other_hash,
        count(*) OVER (PARTITION BY pairs.run, pairs.other_run, one.step) AS difference_count,
        row_number() OVER (PARTITION BY pairs.run, pairs.other_run ORDER BY one.step, one.place) AS place_in_order
    FROM pairs
    JOIN hashes AS one ON one.run = pairs.run
    JOIN hashes AS other ON other.run = pairs.other_run
        AND other.step = one.step
        AND other.quantity = one.quantity
    WHERE one.hash <> other.hash
)
SELECT
    run, -- run directory
    other_run, -- the run that it is compared with
    step, -- optimizer updates, first recorded step that differs
    quantity, -- "batch", or the dotted name of a weight
    hash, -- 64-bit hash
    other_hash, -- 64-bit hash, in the other run
    difference_count -- quantities that differ at this step
FROM differences
WHERE place_in_order = 1
ORDER BY run, other_run;
