-- Did the mean absolute value of a gradient drop below a fixed level?
-- Source: Amazon SageMaker Developer Guide, "List of Debugger built-in rules", VanishingGradient: threshold 0.0000001
-- (awsdocs/amazon-sagemaker-developer-guide, doc_source/debugger-built-in-rules.md at c6db92f).
-- Read in the peer's favour: biases are left out, since softmax ignores a constant and the gradient of a key bias is
-- therefore nothing but round-off in every healthy run with attention; each recorded row counts, not every 500th.
CREATE OR REPLACE MACRO vanishing_gradient(
    mean_abs_threshold := 1e-7 -- objective/weight
) AS TABLE
SELECT
    tensors.run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    name AS subject, -- dotted name of the weight
    min(CAST(mean_abs AS DOUBLE)) AS observed, -- objective/weight
    any_value(CAST(mean_abs_threshold AS DOUBLE)) AS threshold, -- objective/weight
    format('mean absolute gradient below the threshold at {} recorded steps', count(*)) AS detail -- text
FROM tensors
JOIN tensor_names USING (run, rank, segment, tensor_id)
WHERE kind = 'gradient' AND rank = 0 AND name NOT LIKE '%bias%' AND mean_abs < mean_abs_threshold
GROUP BY tensors.run, name
ORDER BY tensors.run, first_step, name;
