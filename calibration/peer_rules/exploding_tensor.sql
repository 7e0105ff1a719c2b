-- Has any tensor or loss a NaN or an infinity?
-- Source: Amazon SageMaker Developer Guide, "List of Debugger built-in rules", ExplodingTensor: only_nan false
-- (awsdocs/amazon-sagemaker-developer-guide, doc_source/debugger-built-in-rules.md at c6db92f).
CREATE OR REPLACE MACRO exploding_tensor(
    element_count_threshold := 0 -- elements
) AS TABLE
SELECT
    run, -- run directory
    step AS first_step, -- optimizer updates
    step AS last_step, -- optimizer updates
    subject, -- the first such quantity
    CAST(nan_count + infinity_count AS DOUBLE) AS observed, -- elements
    CAST(element_count_threshold AS DOUBLE) AS threshold, -- elements
    format('{} NaN and {} infinite elements', nan_count, infinity_count) AS detail -- text
FROM first_nonfinite()
WHERE order_in_step = 1 AND nan_count + infinity_count > element_count_threshold
ORDER BY run;
