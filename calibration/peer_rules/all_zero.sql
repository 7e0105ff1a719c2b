-- Are all elements of a weight, a gradient or an activation zero?
-- Source: Amazon SageMaker Developer Guide, "List of Debugger built-in rules", AllZero: threshold 100 percent, tensors
-- for the user to choose (awsdocs/amazon-sagemaker-developer-guide, doc_source/debugger-built-in-rules.md at c6db92f).
-- Chosen in the peer's favour: everything but biases, which start at zero in a healthy run.
CREATE OR REPLACE MACRO all_zero(
    zero_threshold := 100 -- percent of the elements
) AS TABLE
SELECT
    tensors.run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    format('{} of {}', kind, name) AS subject, -- tensor
    max(100 * CAST(zero_fraction AS DOUBLE)) AS observed, -- percent
    any_value(CAST(zero_threshold AS DOUBLE)) AS threshold, -- percent
    format('zero at {} recorded steps', count(*)) AS detail -- text
FROM tensors
JOIN tensor_names USING (run, rank, segment, tensor_id)
WHERE kind IN ('weight', 'gradient', 'activation')
    AND rank = 0
    AND name NOT LIKE '%bias%'
    AND 100 * CAST(zero_fraction AS DOUBLE) >= zero_threshold
GROUP BY tensors.run, kind, name
ORDER BY tensors.run, first_step, kind, name;
