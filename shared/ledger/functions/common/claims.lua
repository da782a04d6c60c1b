-- Claims: devices that a preemption or a planned start reserves for a pod while the leases on them end, with the
-- node's ordinary resources that the pod needs, as far as they are free. For all other pods the device is in
-- exclusive use, but for those whose leases end by UNTIL. A pod's claim ends with its reservation on any node.
--   claims  hash  pod -> ClaimRecord
--   claim-nodes  zset  pod of every claim -> number of the node that it is on
--   ledger  hash  claims: their number
local capacity = require('capacity')
local layouts = require('layouts')
local ledger = require('ledger')
local records = require('records')
local server = require('server')
local values = require('values')
local call, encode = redis.call, cmsgpack.pack
local C, D, N = layouts.CLAIM, layouts.DEVICE, layouts.NODE

local M = {}
local ended_claims
server.on_begin(function() ended_claims = {} end)

function M.of(pod)
  if ledger.claim_count == 0 then return nil end
  return values.record(call('HGET', server.prefix .. 'claims', pod), C)
end

function M.mark_devices(claim, is_claimed)
  for _, uuid in ipairs(claim[C.DEVICES]) do
    local device = records.device_of(uuid)
    if device then
      device[D.IS_CLAIMED] = is_claimed
      device[D.CLAIMED_UNTIL] = is_claimed and claim[C.UNTIL] or 0
      records.changed_devices[uuid] = true
    end
  end
end

-- Nil for a node that was removed and added again: nothing is reserved on it any more.
function M.node_of(claim)
  local node = records.node_of(claim[C.NODE])
  return node and node[N.NUMBER] == claim[C.NODE_NUMBER] and node or nil
end

-- Count what a claim reserves of its node's ordinary resources (sign 1), or subtract it (sign -1).
function M.add_reserved(claim, sign)
  local node, amounts = M.node_of(claim), {}
  for i, reserved in ipairs(claim[C.RESERVED]) do
    if reserved > 0 then values.append(amounts, claim[C.RESOURCES][2 * i - 1], reserved) end
  end
  if node then capacity.add_to_node(node, amounts, sign) end
end

-- Reserve what is free of the resources that are still missing; return whether there was any.
function M.reserve_more(claim)
  local node = M.node_of(claim)
  if not node then return false end
  local amounts, more = capacity.placed_amounts(claim[C.RESOURCES], node), {}
  for i, reserved in ipairs(claim[C.RESERVED]) do
    local at, wanted = amounts[2 * i - 1], amounts[2 * i]
    local free = at > 0 and node[N.AMOUNTS][at] - node[N.AMOUNTS][at + 1] or 0
    local amount = math.max(0, math.min(wanted - reserved, free))
    if amount > 0 then
      values.append(more, claim[C.RESOURCES][2 * i - 1], amount)
      claim[C.RESERVED][i] = reserved + amount
    end
  end
  if #more > 0 then capacity.add_to_node(node, more, 1) end
  return #more > 0
end

function M.put(pod, claim)
  call('HSET', server.prefix .. 'claims', pod, encode(claim))
  call('ZADD', server.prefix .. 'claim-nodes', claim[C.NODE_NUMBER], pod)
end

-- Suspend the claim of a pod, so that it does not block the pod itself. Call `M.resume` after.
function M.suspend(pod)
  local claim = M.of(pod)
  if claim then
    M.mark_devices(claim, false)
    M.add_reserved(claim, -1)
  end
  return claim
end

function M.resume(pod, claim, has_ended)
  if has_ended then
    ended_claims[#ended_claims + 1] = pod
    if M.node_of(claim) then records.mark_freed(claim[C.NODE]) end
  else
    M.mark_devices(claim, true)
    M.add_reserved(claim, 1)
  end
end

function M.save_count()
  call('HSET', server.prefix .. 'ledger', 'claims', call('HLEN', server.prefix .. 'claims'))
end

-- Delete the claims that have ended; call this once the function cannot refuse any more.
function M.delete_ended()
  if #ended_claims > 0 then
    server.call_all('HDEL', 'claims', ended_claims)
    server.call_all('ZREM', 'claim-nodes', ended_claims)
    M.save_count()
  end
end

-- Reserve the ordinary resources that were freed on these nodes for the pods that claim them.
function M.reserve_freed(names)
  if ledger.claim_count == 0 then return end
  for _, name in ipairs(names) do
    local node = records.node_of(name)
    local number = node and node[N.NUMBER]
    for _, pod in ipairs(number and call('ZRANGEBYSCORE', server.prefix .. 'claim-nodes', number, number) or {}) do
      local claim = M.of(pod)
      if claim and M.reserve_more(claim) then M.put(pod, claim) end
    end
  end
end

return M
