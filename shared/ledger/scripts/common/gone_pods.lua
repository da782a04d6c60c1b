-- Pods that are gone, so that no event of theirs that is still under way has an effect: the uid of a pod
-- is never used again.
--   gone   zset   pod -> instant at which it was reported as gone, in seconds of this server's clock
-- The newest KEPT of them stay whatever the clock does, and all others for KEPT_S.
local gone_pods = {}
do -- A script may have 200 local names.
local KEPT, KEPT_S = 10000, 600

function gone_pods.add(pods)
  local now, parts = tonumber(call('TIME')[1]), {}
  for _, pod in ipairs(pods) do append(parts, now, pod) end
  call_all('ZADD', 'gone', parts)
  local old = call('ZCOUNT', PREFIX .. 'gone', '-inf', now - KEPT_S)
  local surplus = math.min(old, call('ZCARD', PREFIX .. 'gone') - KEPT)
  if surplus > 0 then call('ZREMRANGEBYRANK', PREFIX .. 'gone', 0, surplus - 1) end
end

-- Return {pod -> true} of those that are gone.
function gone_pods.among(pods)
  local found = {}
  for i, score in ipairs(call_all('ZMSCORE', 'gone', pods)) do
    if score then found[pods[i]] = true end
  end
  return found
end
end
