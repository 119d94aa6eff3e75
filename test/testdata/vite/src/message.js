export const message = 'loaded'
