-- Length of the whole gradient before and after clipping.
-- Source: steps, L2 norm over all parameters, rank 0.
CREATE OR REPLACE MACRO gradient_norm_by_step() AS TABLE
SELECT
    run, -- run directory
    step, -- optimizer updates
    gradient_norm, -- objective/weight, non-finite values included
    clipped_gradient_norm -- objective/weight, non-finite values included
FROM steps
WHERE rank = 0 AND gradient_norm IS NOT NULL
ORDER BY run, step;
