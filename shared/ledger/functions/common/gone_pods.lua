-- Pods that are gone, so that no event of theirs that is still under way has an effect: the uid of a pod
-- is never used again.
--   gone   zset   pod -> instant at which it was reported as gone, in seconds of this server's clock
-- The newest KEPT of them stay whatever the clock does, and all others for KEPT_S.
local server = require('server')
local values = require('values')
local call = redis.call

local M = {}
local KEPT, KEPT_S = 10000, 600

function M.add(pods)
  local now, parts = tonumber(server.time()[1]), {}
  for _, pod in ipairs(pods) do values.append(parts, now, pod) end
  server.call_all('ZADD', 'gone', parts)
  local old = call('ZCOUNT', server.prefix .. 'gone', '-inf', now - KEPT_S)
  local surplus = math.min(old, call('ZCARD', server.prefix .. 'gone') - KEPT)
  if surplus > 0 then call('ZREMRANGEBYRANK', server.prefix .. 'gone', 0, surplus - 1) end
end

-- Return {pod -> true} of those that are gone.
function M.among(pods)
  local found, scores = {}, server.call_all('ZMSCORE', 'gone', pods)
  for i = 1, #pods do
    if scores[i] then found[pods[i]] = true end
  end
  return found
end

return M
