-- A lease: a LeaseRecord (`shared/ledger/records.py`). Of a stored one, functions read the NUMBERS, which they change,
-- the REQUEST and the DEMAND; they pass its description and its shares on as they are. A lease that was read is
-- {value, numbers, request, demand, rest}: `rest` is where the value has what comes after the numbers. One that was
-- just reserved has its value alone.
local constants = require('constants')
local layouts = require('layouts')
local ledger = require('ledger')
local server = require('server')
local values = require('values')
local encode, parse_json, unpack_limit = cmsgpack.pack, cjson.decode, cmsgpack.unpack_limit
local byte, record_at = string.byte, values.record_at
local B, DEMAND, NUMBERS, REQUEST = layouts.BOOKING, layouts.DEMAND, layouts.NUMBERS, layouts.REQUEST
local LEASE_HEADER = layouts.LEASE.HEADER
local ARRAY_OF_ONE = 0x91 -- begins a MessagePack array of one value

local M = {}
local parsed_resources
server.on_begin(function() parsed_resources = {} end)

local function has_sound_bookings(demand)
  local bookings, slots = demand[DEMAND.BOOKINGS], demand[DEMAND.SLOTS]
  for i = 1, #bookings do
    local booking = bookings[i]
    if #booking ~= B.COUNT or not values.has_types(booking, B)
      or booking[B.MEMORY_MIB] < 0 or booking[B.CORES_PERCENT] < 0 then
      return false
    end
  end
  for i = 1, #slots, 2 do
    if not bookings[slots[i]] or not slots[i + 1] then return false end
  end
  return true
end

-- The DemandRecord that begins at `at` (from 0), and where the rest begins. Almost all have one booking: it is read as
-- records are, and not with the tables of `unpack`.
function M.demand_at(text, at)
  local bookings_at, node = unpack_limit(text, 1, at + 1)
  if byte(text, bookings_at + 1) == ARRAY_OF_ONE then
    local booking, slots_at = record_at(text, bookings_at + 1, B)
    local rest, slots = unpack_limit(text, 1, slots_at)
    return {node, {booking}, slots}, rest
  end
  local rest, bookings, slots = unpack_limit(text, 2, bookings_at)
  return {node, bookings, slots}, rest
end

local function read(value)
  if byte(value) ~= layouts.LEASE.FIRST_BYTE then return nil end
  local numbers, rest = record_at(value, #LEASE_HEADER, NUMBERS)
  local request, demand_at = record_at(value, rest, REQUEST)
  if byte(value, demand_at + 1) ~= DEMAND.FIRST_BYTE then return nil end
  local demand = M.demand_at(value, demand_at)
  if values.has_types(numbers, NUMBERS) and values.has_types(request, REQUEST) and values.has_types(demand, DEMAND)
    and has_sound_bookings(demand) and #numbers[NUMBERS.GRANTS] == #demand[DEMAND.SLOTS]
    and constants.MAY_BECOME[numbers[NUMBERS.STATE]] and type(M.resources_of(request)) == 'table' then
    return {value = value, numbers = numbers, request = request, demand = demand, rest = rest}
  end
end

-- The lease that a value is, or nil if it is none.
function M.read(value)
  local is_read, lease = pcall(read, value)
  return is_read and lease or nil
end

-- Returns a function that makes the leases of one call, from a version, grants, and the other parts as they were sent:
-- most of the numbers are packed once for all of them.
function M.reserving(now, expires_at)
  local state, times = LEASE_HEADER .. NUMBERS.HEADER .. encode(constants.RESERVED), encode(now, expires_at, 0, 0)
  return function(version, grants, packed_parts)
    local packed_version = encode(version)
    return {value = state .. packed_version .. packed_version .. times .. encode(grants) .. packed_parts}
  end
end

-- Pack the numbers of a lease again.
function M.update(lease)
  local after_numbers = string.sub(lease.value, lease.rest + 1)
  lease.value = LEASE_HEADER .. encode(lease.numbers) .. after_numbers
  lease.rest = #lease.value - #after_numbers
end

-- Advance a lease if the table in shared/model/leases/lease.py allows it; state and version change.
function M.change_state(lease, to)
  local numbers = lease.numbers
  if not constants.MAY_BECOME[numbers[NUMBERS.STATE]][to] then
    error('a lease in state ' .. numbers[NUMBERS.STATE] .. ' cannot become ' .. to)
  end
  if to ~= constants.EXPIRED then numbers[NUMBERS.EXPIRES_AT] = 0 end
  if to == constants.ACTIVE then numbers[NUMBERS.ACTIVATED_AT] = server.now_in_ms() / 1000 end
  numbers[NUMBERS.STATE], numbers[NUMBERS.VERSION] = to, ledger.next_version()
  M.update(lease)
end

-- The device and the fence of a lease's first share, which no other lease has; nil without shares.
function M.first_grant(lease)
  local number = lease.demand[DEMAND.SLOTS][1]
  if number then return lease.demand[DEMAND.BOOKINGS][number][B.DEVICE], lease.numbers[NUMBERS.GRANTS][2] end
end

-- {name, amount, ...} of a request's ordinary resources; the same table for the same text.
function M.resources_of(request)
  local text = request[REQUEST.RESOURCES]
  parsed_resources[text] = parsed_resources[text] or parse_json(text)
  return parsed_resources[text]
end

return M
