-- Pods that are gone, so that no event of theirs that is still under way has an effect: the uid of a pod
-- is never used again.
--   gone   zset   pod -> instant at which it was reported as gone, in seconds of this server's clock
-- The newest KEPT of them stay whatever the clock does, and all others for KEPT_S.
local gone_pods = {}
do -- A script may have 200 local names.
local KEPT, KEPT_S = 10000, 600

function gone_pods.add(pods)
  local now, parts = tonumber(call('TIME')[1]), {}
  for _, pod in ipairs(pods) do
    parts[#parts + 1] = now
    parts[#parts + 1] = pod
  end
  write('ZADD', 'gone', parts)
  local old = call('ZCOUNT', PREFIX .. 'gone', '-inf', now - KEPT_S)
  local surplus = math.min(old, call('ZCARD', PREFIX .. 'gone') - KEPT)
  if surplus > 0 then call('ZREMRANGEBYRANK', PREFIX .. 'gone', 0, surplus - 1) end
end

-- Return {pod -> true} of those that are gone.
function gone_pods.among(pods)
  local found = {}
  for from = 1, #pods, MAX_ARGS do
    local to = math.min(from + MAX_ARGS - 1, #pods)
    local scores = call('ZMSCORE', PREFIX .. 'gone', unpack(pods, from, to))
    for i = 1, #scores do
      if scores[i] then found[pods[from + i - 1]] = true end
    end
  end
  return found
end
end
