-- Claims: devices that a preemption or a planned start reserves for a pod while the leases on them end, with the
-- node's ordinary resources that the pod needs, as far as they are free. For all other pods the device is in
-- exclusive use, but for those whose leases end by UNTIL. A pod's claim ends with its reservation on any node.
--   claims  hash  pod -> see FIELD
--   ledger  hash  claims: their number
-- RESOURCES: {name, amount, ...} that the pod requests; HELD: how much of each is reserved; UNTIL: the second by
-- which what is let onto the devices has to end, 0: nothing is.
-- MARK is added to a device's EXCLUSIVE.
local capacity = require('capacity')
local ledger = require('ledger')
local records = require('records')
local server = require('server')
local values = require('values')
local call, encode = redis.call, cmsgpack.pack
local D, N = records.D, records.N

local FIELD = {NODE = 1, NODE_NUMBER = 2, UUIDS = 3, RESOURCES = 4, HELD = 5, UNTIL = 6}
local M = {MARK = 2, FIELD = FIELD}
local ended_claims
server.on_begin(function() ended_claims = {} end)

function M.of(pod)
  if ledger.claim_count == 0 then return nil end
  local claim = values.readable(call('HGET', server.prefix .. 'claims', pod))
  return claim[FIELD.UNTIL] and claim or nil
end

function M.mark_devices(claim, is_claimed)
  for _, uuid in ipairs(claim[FIELD.UUIDS]) do
    local device = records.device_of(uuid)
    if device then
      device[D.EXCLUSIVE] = device[D.EXCLUSIVE] % 2 + (is_claimed and M.MARK or 0)
      device[D.CLAIMED_UNTIL] = is_claimed and claim[FIELD.UNTIL] or 0
      records.changed_devices[uuid] = true
    end
  end
end

-- Nil for a node that was removed and added again: nothing is reserved on it any more.
function M.node_of(claim)
  local node = records.node_of(claim[FIELD.NODE])
  return node and node[N.NUMBER] == claim[FIELD.NODE_NUMBER] and node or nil
end

local function add_reserved(claim, sign)
  local node, amounts = M.node_of(claim), {}
  for i, reserved in ipairs(claim[FIELD.HELD]) do
    if reserved > 0 then values.append(amounts, claim[FIELD.RESOURCES][2 * i - 1], reserved) end
  end
  if node then capacity.add_to_node(node, amounts, sign) end
end

-- Reserve what is free of the resources that are still missing.
function M.reserve_more(claim)
  local node = M.node_of(claim)
  if not node then return end
  local amounts, more = capacity.placed_amounts(claim[FIELD.RESOURCES], node), {}
  for i, reserved in ipairs(claim[FIELD.HELD]) do
    local at, wanted = amounts[2 * i - 1], amounts[2 * i]
    local free = at > 0 and node[at] - node[at + 1] or 0
    local amount = math.max(0, math.min(wanted - reserved, free))
    if amount > 0 then
      values.append(more, claim[FIELD.RESOURCES][2 * i - 1], amount)
      claim[FIELD.HELD][i] = reserved + amount
    end
  end
  if #more > 0 then capacity.add_to_node(node, more, 1) end
end

function M.put(pod, claim) call('HSET', server.prefix .. 'claims', pod, encode(claim)) end

-- Suspend the claim of a pod, so that it does not block the pod itself. Call `M.resume` after.
function M.suspend(pod)
  local claim = M.of(pod)
  if claim then
    M.mark_devices(claim, false)
    add_reserved(claim, -1)
  end
  return claim
end

function M.resume(pod, claim, has_ended)
  if has_ended then
    ended_claims[#ended_claims + 1] = pod
    if M.node_of(claim) then records.mark_freed(claim[FIELD.NODE]) end
  else
    M.mark_devices(claim, true)
    add_reserved(claim, 1)
  end
end

function M.save_count()
  call('HSET', server.prefix .. 'ledger', 'claims', call('HLEN', server.prefix .. 'claims'))
end

-- Delete the claims that have ended; call this once the function cannot refuse any more.
function M.delete_ended()
  if #ended_claims > 0 then
    call('HDEL', server.prefix .. 'claims', unpack(ended_claims))
    M.save_count()
  end
end

-- Reserve the ordinary resources that were freed on these nodes for the pods that claim them.
function M.reserve_freed(names)
  if ledger.claim_count == 0 then return end
  local is_freed = {}
  for _, name in ipairs(names) do is_freed[name] = true end
  for pod, claim in server.each_packed(server.prefix .. 'claims') do
    if is_freed[claim[FIELD.NODE] or false] then
      M.reserve_more(claim)
      M.put(pod, claim)
    end
  end
end

return M
