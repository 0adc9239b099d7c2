// SPDX-License-Identifier: Apache-2.0

package bpf

import "embed"

// Include holds what handlers in C include: xspin_handler.h, and xspin_kernel.h that it
// includes itself.
//
//go:embed include/*.h
var Include embed.FS

// Handlers are the objects of the built-in handlers by name, each the twin in the kernel
// of the set of that name in package handlers. They are as clang made them, so whoever
// loads one checks it as if it came from somebody else.
var Handlers = map[string][]byte{
	"count":         _HandlersCountBytes,
	"deposit":       _HandlersDepositBytes,
	"echo-icmp":     _HandlersEchoICMPBytes,
	"echo-udp":      _HandlersEchoUDPBytes,
	"noop":          _HandlersNoopBytes,
	"noop-messages": _HandlersNoopMessagesBytes, // noop's twin for formats whose messages end
}

// Witness is the object of handlers that note in HPU memory what ran, for tests; and what
// it notes. It is a function so that programs that do not test are without it.
func Witness() []byte { return _HandlersWitnessBytes }

// What the handlers of Witness leave in HPU memory.
type (
	WitnessHead = HandlersWitnessWitnessHead
	WitnessRun  = HandlersWitnessWitnessRun
)

// What they note, and what numbers of messages ask of them.
const (
	WitnessHeader     = uint32(HandlersWitnessXspinHasXSPIN_HAS_HEADER)
	WitnessPayload    = uint32(HandlersWitnessXspinHasXSPIN_HAS_PAYLOAD)
	WitnessCompletion = uint32(HandlersWitnessXspinHasXSPIN_HAS_COMPLETION)

	WitnessProceed        = uint32(HandlersWitnessWitnessOrderWITNESS_PROCEED)
	WitnessDropMessage    = uint32(HandlersWitnessWitnessOrderWITNESS_DROP_MESSAGE)
	WitnessDropPayload    = uint32(HandlersWitnessWitnessOrderWITNESS_DROP_PAYLOAD)
	WitnessFailPayload    = uint32(HandlersWitnessWitnessOrderWITNESS_FAIL_PAYLOAD)
	WitnessFailHeader     = uint32(HandlersWitnessWitnessOrderWITNESS_FAIL_HEADER)
	WitnessFailCompletion = uint32(HandlersWitnessWitnessOrderWITNESS_FAIL_COMPLETION)
)

// EnginePackets and EngineMessages are the objects of the engines, to one of which the handlers
// of an object are linked; those with TC are for the tc hook.
func EnginePackets() []byte    { return _EnginePacketsBytes }
func EnginePacketsTC() []byte  { return _EnginePacketsTCBytes }
func EngineMessages() []byte   { return _EngineMessagesBytes }
func EngineMessagesTC() []byte { return _EngineMessagesTCBytes }

// HandlersDeclared is what include/xspin_handler.h has an object declare.
type HandlersDeclared = HandlersNoopXspinDeclared

// Types that src/engine/engine.h shares with user space, under short names.
type (
	HandlerConstants = EnginePacketsXspinConstants
	HandlerCounters  = EnginePacketsXspinCounters
	HandlerWord      = EnginePacketsXspinWord
	HandlerPair      = EnginePacketsXspinPair
)

// Types that src/engine/messages.bpf.c shares with user space, under short names.
type (
	MessageSettings = EngineMessagesXspinSettings
	MessageRange    = EngineMessagesXspinRange
	MessageSlot     = EngineMessagesXspinMessage
	MessageClaims   = EngineMessagesXspinClaims
	MessageTally    = EngineMessagesXspinTally
	MessageEvent    = EngineMessagesXspinEvent
	MessageSlip     = EngineMessagesXspinSlip
	MessageOrder    = EngineMessagesXspinOrder
	MessageScratch  = EngineMessagesXspinScratch
	MessageNote     = EngineMessagesXspinNote
	MessageReceive  = EngineMessagesXspinReceive
	MessageRing     = EngineMessagesXspinRing
	MessageRoom     = EngineMessagesXspinRoom
	MessageOwed     = EngineMessagesXspinOwed
	MessagePast     = EngineMessagesXspinPast
)

// HandlersVersion is the version of xspin_handler.h, and HandlersOldest the oldest that an object may be made with.
// Objects of version 2 read and write the frame themselves, not by functions of the engine.
const (
	HandlersVersion = 3
	HandlersOldest  = 2
)

// Names in an object with handlers.
const (
	HandlersVersionOf = HandlersNoopVarXspinVersion
	HandlersSection   = ".rodata.xspin"          // of what the header declares
	HandlersDeclares  = "xspin_context.declared" // there: a HandlersDeclared
)

// Names in the engines.
const (
	HandlersProgram   = EnginePacketsProgXspinContext
	HandlersAPI       = EnginePacketsProgXspinApi
	HandlersCPU       = EnginePacketsMapXspinCpu
	HandlersShared    = EnginePacketsMapXspinShared
	HandlersOwn       = EnginePacketsMapXspinOwn
	HandlersConstants = EnginePacketsVarXspin

	// In the engine of messages.
	MessagesExpire   = EngineMessagesProgXspinExpire
	MessagesSettings = EngineMessagesVarXspinSetup
	MessagesTable    = EngineMessagesMapXspinTable
	MessagesSlots    = EngineMessagesMapXspinMessages
	MessagesBits     = EngineMessagesMapXspinBits
	MessagesFree     = EngineMessagesMapXspinFree
	MessagesEnded    = EngineMessagesMapXspinEnded
	MessagesEvents   = EngineMessagesMapXspinEvents
	MessagesTallies  = EngineMessagesMapXspinTallies
	MessagesState    = EngineMessagesMapXspinStates
	MessagesBuffer   = EngineMessagesMapXspinBuffer
	MessagesHanded   = EngineMessagesMapXspinHanded
	MessagesUser     = EngineMessagesMapXspinUser
	MessagesReceives = EngineMessagesMapXspinReceives
	MessagesPosted   = EngineMessagesMapXspinPosted
	MessagesRooms    = EngineMessagesMapXspinRooms
)

// MessagesWindows are the maps of windows.
var MessagesWindows = [...]string{EngineMessagesMapXspinWindow0, EngineMessagesMapXspinWindow1, EngineMessagesMapXspinWindow2, EngineMessagesMapXspinWindow3}
