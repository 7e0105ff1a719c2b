-- Did a resume begin with another learning rate than the plan asks for at its step?
-- Source: the plan against the first applied rate of a segment whose run kept to the plan until then. The loss does
-- not show it: Adam forgives a repeated ramp.
CREATE OR REPLACE MACRO schedule_reset_on_resume(
    -- A plan that is written down in float32 differs by up to 2^-24 = 6e-8 of the peak; sixteenfold that.
    deviation_threshold := 1e-6 -- 1, share of the planned peak
) AS TABLE
WITH judged AS (
    SELECT
        run, segment, step, learning_rate, planned_learning_rate, deviation,
        max(deviation) OVER earlier AS earlier_deviation,
        min(step) FILTER (WHERE deviation <= deviation_threshold) OVER later AS rejoined_step,
        max(step) OVER (PARTITION BY run) AS end_step
    FROM plan_deviation_by_step()
    WINDOW
        earlier AS (PARTITION BY run ORDER BY step ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING),
        later AS (PARTITION BY run ORDER BY step ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING)
),
plans AS (
    SELECT run, step, learning_rate AS rate, planned_learning_rate AS plan FROM plan_deviation_by_step()
)
SELECT
    judged.run, -- run directory
    judged.step AS first_step, -- optimizer updates, first step after the resume
    coalesce(rejoined_step - 1, end_step) AS last_step, -- optimizer updates, before rate and plan meet again
    'learning_rate' AS subject, -- quantity
    deviation AS observed, -- 1, deviation at the first step as a share of the peak
    CAST(deviation_threshold AS DOUBLE) AS threshold, -- 1
    format(
        'segment {} begins at step {} with {:.4g} against {:.4g} planned', judged.segment, judged.step, learning_rate,
        planned_learning_rate
    ) || CASE
        WHEN abs(learning_rate - plans.plan) <= deviation_threshold * plans.plan
            THEN '; that is the plan''s rate of step 0: the schedule counts from 0 again'
        ELSE ''
    END AS detail -- text
FROM judged
JOIN resume_states() AS resumed ON resumed.run = judged.run AND resumed.step = judged.step
LEFT JOIN plans ON plans.run = judged.run AND plans.step = 0
WHERE deviation > deviation_threshold AND coalesce(earlier_deviation, 0) <= deviation_threshold
ORDER BY judged.run, judged.step;
