-- Is an update larger than ten times its weight, or smaller than a hundred-millionth of it?
-- Source: Amazon SageMaker Developer Guide, "List of Debugger built-in rules", WeightUpdateRatio: large_threshold 10,
-- small_threshold 0.00000001, epsilon 0.000000001, two consecutive steps
-- (awsdocs/amazon-sagemaker-developer-guide, doc_source/debugger-built-in-rules.md at c6db92f).
-- Read in the peer's favour: biases are left out, since they start at zero in a healthy run.
CREATE OR REPLACE MACRO weight_update_ratio(
    large_threshold := 10, -- 1, norm of the update / norm of the weight
    small_threshold := 1e-8, -- 1
    epsilon := 1e-9 -- as weight, added to its norm
) AS TABLE
WITH ratios AS (
    SELECT
        updates.run, updates.step, name,
        updates.l2_norm / (weights.l2_norm + epsilon) AS ratio
    FROM tensors AS updates
    JOIN tensors AS weights USING (run, rank, segment, step, tensor_id)
    JOIN tensor_names USING (run, rank, segment, tensor_id)
    WHERE updates.kind = 'update'
        AND weights.kind = 'weight'
        AND updates.rank = 0
        AND name NOT LIKE '%bias%'
        AND isfinite(updates.l2_norm)
        AND isfinite(weights.l2_norm)
)
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    name AS subject, -- dotted name of the weight
    arg_min(ratio, step) AS observed, -- 1, at first_step
    any_value(CAST(CASE WHEN ratio > large_threshold THEN large_threshold ELSE small_threshold END AS DOUBLE))
        AS threshold, -- 1
    format('ratio outside of the thresholds at {} recorded steps', count(*)) AS detail -- text
FROM ratios
WHERE ratio > large_threshold OR ratio < small_threshold
GROUP BY run, name, ratio > large_threshold
ORDER BY run, first_step, name;
