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

// What include/xspin_handler.h shares with user space, under short names.
type (
	HandlerConstants = HandlersNoopXspinConstants
	HandlerCounters  = HandlersNoopXspinCounters
	HandlerWord      = HandlersNoopXspinWord
	HandlerPair      = HandlersNoopXspinPair
)

// What include/xspin_message.h shares with user space, under short names.
type (
	MessageSettings = HandlersDepositXspinSettings
	MessageRange    = HandlersDepositXspinRange
	MessageSlot     = HandlersDepositXspinMessage
	MessageClaims   = HandlersDepositXspinClaims
	MessageTally    = HandlersDepositXspinTally
	MessageEvent    = HandlersDepositXspinEvent
	MessageSlip     = HandlersDepositXspinSlip
	MessageOrder    = HandlersDepositXspinOrder
	MessageScratch  = HandlersDepositXspinScratch
	MessageNote     = HandlersDepositXspinNote
	MessageReceive  = HandlersDepositXspinReceive
	MessageRing     = HandlersDepositXspinRing
)

// HandlersVersion is the version of xspin_handler.h that an object must be made with.
const HandlersVersion = 1

// Names in an object with handlers.
const (
	HandlersProgram   = HandlersNoopProgXspinContext
	HandlersCPU       = HandlersNoopMapXspinCpu
	HandlersShared    = HandlersNoopMapXspinShared
	HandlersOwn       = HandlersNoopMapXspinOwn
	HandlersConstants = HandlersNoopVarXspin
	HandlersVersionOf = HandlersNoopVarXspinVersion

	// In one with handlers of messages.
	MessagesExpire   = HandlersDepositProgXspinExpire
	MessagesSettings = HandlersDepositVarXspinSetup
	MessagesTable    = HandlersDepositMapXspinTable
	MessagesSlots    = HandlersDepositMapXspinMessages
	MessagesBits     = HandlersDepositMapXspinBits
	MessagesFree     = HandlersDepositMapXspinFree
	MessagesEnded    = HandlersDepositMapXspinEnded
	MessagesEvents   = HandlersDepositMapXspinEvents
	MessagesTallies  = HandlersDepositMapXspinTallies
	MessagesState    = "xspin_states"
	MessagesBuffer   = HandlersDepositMapXspinBuffer
	MessagesHanded   = HandlersDepositMapXspinHanded
	MessagesUser     = HandlersDepositMapXspinUser
	MessagesReceives = HandlersDepositMapXspinReceives
	MessagesPosted   = HandlersDepositMapXspinPosted
)

// MessagesWindows are the maps of windows.
var MessagesWindows = [...]string{HandlersDepositMapXspinWindow0, HandlersDepositMapXspinWindow1, HandlersDepositMapXspinWindow2, HandlersDepositMapXspinWindow3}
