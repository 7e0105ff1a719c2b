-- Are more than half of a layer's ReLUs dead?
-- Source: Amazon SageMaker Developer Guide, "List of Debugger built-in rules", DeadRelu: threshold_layer 50 percent,
-- threshold_inactivity 1 percent (awsdocs/amazon-sagemaker-developer-guide, doc_source/debugger-built-in-rules.md at
-- c6db92f). The log counts the units that are active on no token of a window; those that are active on less than a
-- hundredth are not told apart from the others, so that this is the rule with threshold_inactivity 0.
CREATE OR REPLACE MACRO dead_relu(
    threshold_layer := 50 -- percent of the layer's units
) AS TABLE
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    format('layer {}', layer) AS subject, -- block
    max(100 * dead_unit_count / unit_count) AS observed, -- percent
    any_value(CAST(threshold_layer AS DOUBLE)) AS threshold, -- percent
    format('{} of {} units dead', max(dead_unit_count), any_value(unit_count)) AS detail -- text
FROM units
WHERE rank = 0 AND unit_count > 0 AND 100 * dead_unit_count / unit_count > threshold_layer
GROUP BY run, layer
ORDER BY run, layer;
