-- Did a weight stay the same over its last recorded steps?
-- Source: Amazon SageMaker Developer Guide, "List of Debugger built-in rules", UnchangedTensor: num_steps 3 (recorded
-- ones), numpy.allclose with rtol 1e-5 and atol 1e-8, tensors for the user to choose
-- (awsdocs/amazon-sagemaker-developer-guide, doc_source/debugger-built-in-rules.md at c6db92f).
-- Equal hashes mean equal bytes. Tensors that are not equal but close are missed: the log has no elements to compare.
CREATE OR REPLACE MACRO unchanged_tensor(
    num_steps := 3 -- recorded steps
) AS TABLE
WITH stretches AS (
    SELECT
        tensors.run, step, name,
        min(step) OVER last_rows AS first_step,
        count(content_hash) OVER last_rows AS row_count,
        min(content_hash) OVER last_rows = max(content_hash) OVER last_rows AS is_unchanged
    FROM tensors
    JOIN tensor_names USING (run, rank, segment, tensor_id)
    WHERE kind = 'weight' AND rank = 0 AND content_hash IS NOT NULL
    WINDOW last_rows AS (
        PARTITION BY tensors.run, name ORDER BY step ROWS BETWEEN num_steps - 1 PRECEDING AND CURRENT ROW
    )
)
SELECT
    run, -- run directory
    min(first_step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    name AS subject, -- dotted name of the weight
    CAST(count(*) + any_value(num_steps) - 1 AS DOUBLE) AS observed, -- recorded steps
    any_value(CAST(num_steps AS DOUBLE)) AS threshold, -- recorded steps
    'equal hashes' AS detail -- text
FROM stretches
WHERE row_count = num_steps AND is_unchanged
GROUP BY run, name
ORDER BY run, first_step, name;
